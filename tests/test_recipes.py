"""The digits that come with the package, and the demo page run as a user runs it."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from unisono.recipes.digits_data import load_digits

BACKENDS = ["jax", "tensorflow", "torch"]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def test_digits_have_the_promised_form():
    (x_train, y_train), (x_test, y_test) = load_digits()
    assert x_train.shape == (1437, 8, 8, 1)
    assert x_test.shape == (360, 8, 8, 1)
    assert y_train.shape == (1437,)
    assert y_test.shape == (360,)
    assert x_train.dtype == x_test.dtype == np.float32
    assert x_train.min() == 0.0
    assert x_train.max() == 1.0
    assert set(np.unique(y_train)) == set(np.unique(y_test)) == set(range(10))


def test_split_loses_and_repeats_nothing():
    halves = load_digits(num_test=1000)
    whole = load_digits(num_test=1)

    def sorted_rows(splits):
        rows = [np.column_stack([x.reshape(len(x), -1), y]) for x, y in splits]
        joined = np.concatenate(rows)
        return joined[np.lexsort(joined.T)]

    np.testing.assert_array_equal(sorted_rows(halves), sorted_rows(whole))


def test_split_follows_the_seed():
    (first, _), _ = load_digits(seed=1)
    (again, _), _ = load_digits(seed=1)
    (other, _), _ = load_digits(seed=2)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_labels_belong_to_their_images():
    """A nearest-neighbour guess is right almost always, which shuffled labels would break."""
    (x_train, y_train), (x_test, y_test) = load_digits()
    train, test = x_train.reshape(len(x_train), -1), x_test.reshape(len(x_test), -1)
    distances = (test**2).sum(1)[:, None] - 2 * test @ train.T + (train**2).sum(1)
    assert np.mean(y_train[distances.argmin(1)] == y_test) > 0.97


@pytest.mark.parametrize("num_test", [0, -1, 1797])
def test_impossible_split_is_refused(num_test):
    with pytest.raises(ValueError, match=f"Asked for {num_test} test images"):
        load_digits(num_test=num_test)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_digits_page_runs(backend, tmp_path):
    accuracies, difference = run_page(backend, tmp_path / "demo.png", epochs=1)
    assert accuracies["one device"] == accuracies["2 replicas"]
    assert difference < 1e-5


@pytest.mark.slow
def test_digits_page_learns(tmp_path):
    accuracies, difference = run_page("jax", tmp_path / "demo.png", epochs=12)
    assert min(accuracies.values()) >= 97.0
    assert difference < 1e-5


def run_page(backend: str, plot: Path, *, epochs: int) -> tuple[dict[str, float], float]:
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    command = [sys.executable, "-m", "unisono.recipes.digits"]
    options = ["--replicas", "2", "--epochs", str(epochs), "--output", str(plot)]
    done = subprocess.run(
        [*command, *options],
        env=os.environ | {"KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert f"{epochs} epochs, {backend} backend" in done.stdout
    assert done.stdout.splitlines()[-1] == f"plot: {plot}"
    assert plot.read_bytes().startswith(PNG_SIGNATURE)

    results = re.findall(
        r"^(.+): test accuracy ([\d.]+)%, [\d.]+ s per epoch$", done.stdout, re.MULTILINE
    )
    assert [name for name, _ in results] == ["one device", "2 replicas"]
    difference = re.search(r"^largest weight difference: (\S+)$", done.stdout, re.MULTILINE)
    assert difference is not None
    return {name: float(percent) for name, percent in results}, float(difference[1])
