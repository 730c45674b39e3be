"""`unisono verify` on programs that are right and on programs that are not, and its test helper."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import ops

from unisono import parallel
from unisono.testing import assert_same_as_one_device

PROGRAM = Path(__file__).with_name("verify_program.py")
BACKEND = keras.backend.backend()
pytestmark = pytest.mark.timeout(600)
off_jax = pytest.mark.skipif(BACKEND == "jax", reason="replicas see the global batch on JAX")


def start(*words: object) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if not k.startswith("UNISONO_")}
    return subprocess.Popen(
        [sys.executable, "-m", "unisono", "verify", *map(str, words)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# What is found out about the program is the same on every backend, and takes half a minute each.
on_jax = pytest.mark.skipif(
    BACKEND != "jax", reason="found in the same way on JAX, and tested there"
)
on_torch = pytest.mark.skipif(
    BACKEND != "torch", reason="found in the same way on torch, and tested there"
)


def verify(*words: object) -> tuple[int, dict]:
    """The exit code and the JSON of a verification of three steps."""
    process = start("--json", "--steps", 3, *words)
    out, err = process.communicate(timeout=500)
    assert out, err
    return process.returncode, json.loads(out)


def test_a_right_program_passes():
    code, found = verify(PROGRAM, "right")
    assert code == 0, found
    assert found["verdict"].startswith("2 replicas give what 1 gives (")
    assert found["num_steps"] == 3
    kinds = ("weights", "optimizer", "loss", "metrics", "evaluate", "predict")
    assert all(found["largest"][kind] is not None for kind in kinds)
    assert max(found["largest"].values()) <= 1e-5
    assert found["causes"] == []


@on_jax
def test_a_scaled_learning_rate_is_named_with_its_line():
    code, found = verify(PROGRAM, "rate")
    assert code == 1
    assert found["first"]["step"] == 1
    cause = found["causes"][0]
    assert cause["cause"] == "learning rate"
    assert "0.05" in cause["evidence"]
    assert "0.1" in cause["evidence"]
    assert "SGD(0.05 * factor" in cause["site"]["text"]


@pytest.mark.slow
@on_jax
def test_a_scaled_batch_is_named_and_can_be_compared():
    code, found = verify(PROGRAM, "batch")
    assert code == 1
    assert found["causes"][0]["cause"] == "global batch"
    assert "batch_size=12, and batch_size=24" in found["causes"][0]["evidence"]
    assert "agree" in found["causes"][0]["evidence"]
    assert verify("--same-batch", PROGRAM, "batch")[0] == 0


@pytest.mark.slow
@on_torch
def test_data_without_a_seed_is_named_and_can_be_seeded():
    code, found = verify(PROGRAM, "unseeded")
    assert code == 1
    assert found["causes"][0]["cause"] == "unseeded data"
    assert "default_rng(" in found["causes"][0]["site"]["text"]
    assert verify("--exact", PROGRAM, "unseeded")[0] == 0


@pytest.mark.slow
@on_torch
def test_data_that_differs_by_process_is_named():
    assert verify("--processes", PROGRAM, "right")[0] == 0
    code, found = verify("--processes", PROGRAM, "by process")
    assert code == 1
    assert found["causes"][0]["cause"] == "data by process"
    assert "model.fit" in found["causes"][0]["site"]["text"]


@pytest.mark.parametrize(("how", "said"), [("fail", "no data here"), ("leave", "trains no model")])
def test_a_program_that_cannot_be_compared_has_another_exit_code(how, said):
    code, found = verify(PROGRAM, how)
    assert code == 2
    assert said in found["verdict"] + found["output"]


def test_an_interrupt_ends_all_processes(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(100)\n"
    )
    process = start(script)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# -- the helper for test suites -------------------------------------------------------------------

draw = np.random.default_rng(0)
X = draw.normal(size=(48, 6)).astype("float32")
Y = draw.integers(0, 3, 48)


def net(*layers, optimizer="sgd", **options):
    def build():
        parts = [make() for make in layers]
        model = keras.Sequential([keras.Input((6,)), *parts, keras.layers.Dense(3)], name="net")
        if options:
            parallel(model, **options)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
        return model

    return build


def check(build, **options) -> None:
    assert_same_as_one_device(build, (X, Y), batch_size=16, steps=4, **options)


def test_a_net_with_batch_norm_is_the_same():
    # Adam divides the rounding of the first bias, whose gradient is zero, by itself.
    layers = [lambda: keras.layers.Dense(8), keras.layers.BatchNormalization]
    check(net(*layers, optimizer="adam"))


def test_batch_norm_per_replica_is_named():
    build = net(keras.layers.BatchNormalization, sync_batch_norm=False)
    with pytest.raises(AssertionError, match="Cause: batch norm is kept per replica") as raised:
        check(build)
    assert "with synchronized batch norm they agree" in str(raised.value)


def test_dropout_is_named_and_can_be_compared():
    layers = [
        lambda: keras.layers.Dropout(0.3),
        lambda: keras.layers.Dense(8),
        lambda: keras.layers.Dropout(0.2, seed=1),
        lambda: keras.layers.GaussianNoise(0.1),
    ]
    build = net(*layers)
    if BACKEND != "jax":
        with pytest.raises(AssertionError, match="ause: Dropout, GaussianNoise"):
            check(build)
    else:
        check(build, exact=True)
        check(build, exact=True, replicas=3)


class Contrastive(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.layers.Dense(4)

    def call(self, x):
        return self.encoder(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        logits = ops.matmul(y_pred, ops.transpose(y_pred))
        labels = ops.arange(ops.shape(logits)[0])
        losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        return ops.mean(losses)


@off_jax
@pytest.mark.filterwarnings("ignore:Contrastive")
def test_a_loss_over_pairs_of_rows_is_named():
    def build():
        model = Contrastive()
        model(X[:2])
        model.compile("sgd")
        return model

    with pytest.raises(AssertionError, match="neither a mean nor a sum"):
        check(build)


class Centered(keras.layers.Layer):
    def call(self, x):
        return x - ops.max(x, axis=0, keepdims=True)


@off_jax
def test_a_layer_that_mixes_rows_is_found():
    with pytest.raises(AssertionError, match="2 replicas do not give what 1 gives"):
        check(net(Centered))
