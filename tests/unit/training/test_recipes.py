"""The digits that come with the package, the recipes as pages, and the commands that give them."""

import ast

import numpy as np
import pytest

from unisono.cli import main
from unisono.cli import train as train_command
from unisono.recipes.digits_data import load_digits

NAMES = ("digits", "mnist", "cifar10", "resnet50")
OURS = {"unisono", "unisono.training", "unisono.schedules"}


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


def test_the_recipes_are_listed(capsys):
    assert main(["train", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(NAMES)
    assert all(len(line.split(maxsplit=1)[1]) > 30 for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_handed_over_as_it_is(name, capsys):
    assert main(["recipe", name]) == 0
    assert capsys.readouterr().out == train_command.page(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_short_and_uses_only_what_a_user_can_import(name):
    text = train_command.page(name)
    assert len(text.splitlines()) < 120
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            is_package = node.module == "unisono"
            imported |= {f"unisono.{a.name}" for a in node.names} if is_package else {node.module}
    allowed = OURS | {"keras", "numpy", "unisono.recipes.digits_data"}
    assert {"keras", "unisono"} <= imported <= allowed
    # Nothing of ours with an underscore, and the options before the framework.
    assert "._" not in text
    assert text.index("training.begin(") < text.index("import keras")


@pytest.mark.parametrize(
    ("asked", "guess"), [("cifar", "cifar10"), ("minst", "mnist"), ("ResNet", "resnet50")]
)
def test_an_unknown_recipe_and_the_nearest(asked, guess, capsys):
    for command in ("train", "recipe"):
        assert main([command, asked]) == 1
        said = capsys.readouterr().err
        assert f"Asked for the recipe {asked!r}; there are digits, mnist, cifar10" in said
        assert said.endswith(f"Did you mean {guess}?\n")


def test_an_unknown_recipe_that_is_near_to_none(capsys):
    assert main(["train", "zzz"]) == 1
    assert "Did you mean" not in capsys.readouterr().err


def test_no_recipe_at_all(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train"])
    assert ended.value.code == 2
    assert "which recipe? `unisono train --list` describes them" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "named"), [([], "digits"), (["mnist"], "mnist")])
def test_options_before_a_recipe(capsys, words, named):
    with pytest.raises(SystemExit) as ended:
        main(["train", "--epochs", "2", *words])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "which recipe is --epochs for? Write its name first" in said
    assert f"`unisono train {named} --epochs 2`" in said


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--epochs", "0"], 2, "'0' is not a whole number of at least 1"),
        (["--output", "/proc/unisono"], 1, "cifar10: Asked for results in /proc/unisono: "),
        (["--data", "nowhere"], 1, "cifar10: Asked for data from 'nowhere'; there is no such"),
        (["--gpus", "4"], 1, "cifar10: Asked for GPUs [0, 1, 2, 3]; the backend sees no GPU"),
        (["--replicas", "1", "--compare"], 1, "Asked to compare one replica with one"),
        (["--help"], 0, ""),
    ],
)
def test_mistakes_are_told_before_a_framework_is_loaded(words, code, said, plain_python, tmp_path):
    script = (
        "import sys; from unisono.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print('loaded', {'keras', 'jax', 'tensorflow', 'torch'} & set(sys.modules))"
    )
    if "/proc/unisono" not in words:
        words = [*words, "--output", str(tmp_path)]
    done = plain_python(["-c", script, "train", "cifar10", *words], KERAS_BACKEND=_any_backend())
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1] == "loaded set()"


def _any_backend() -> str:
    from importlib.machinery import PathFinder

    backends = ("jax", "tensorflow", "torch")
    found = [name for name in backends if PathFinder.find_spec(name) is not None]
    return found[0] if found else pytest.skip("no backend is installed")
