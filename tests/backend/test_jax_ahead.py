"""Steps run ahead of CPU devices by a few only: with many XLA's threads wait for each other."""

import os
import subprocess
import sys
from collections import deque

import pytest
from twins import BACKEND

if BACKEND != "jax":
    pytest.skip("JAX's threads", allow_module_level=True)

import jax
from jax import numpy

from unisono.engines import jax_ahead

# Without a limit four replicas hang here within the first 80 steps; XLA aborts after a minute.
MANY_STEPS = """
import keras, numpy as np, unisono
net = [keras.Input((28, 28, 1)), keras.layers.Conv2D(8, 3, activation="relu")]
net += [keras.layers.Flatten(), keras.layers.Dense(10)]
model = unisono.parallel(keras.Sequential(net), replicas=4)
model.compile("sgd", "mse")
x, y = np.ones((20480, 28, 28, 1), "float32"), np.ones((20480, 10), "float32")
model.fit(x, y, batch_size=256, epochs=2, verbose=0)
model.evaluate(x, y, batch_size=256, verbose=0)
print(model.predict(x, batch_size=256, verbose=0).shape)
"""


@pytest.fixture
def under_way(monkeypatch):
    steps: deque = deque()
    monkeypatch.setattr(jax_ahead, "_under_way", steps)
    return steps


def test_many_steps_of_more_replicas_than_cores():
    env = {**os.environ, "KERAS_BACKEND": "jax"}
    words = [sys.executable, "-c", MANY_STEPS]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("(20480, 10)\n")


@pytest.fixture
def waited_for(monkeypatch):
    """The numbers that were waited for, in order."""
    waited = []
    monkeypatch.setattr(
        jax, "block_until_ready", lambda arrays: waited.extend(float(a.max()) for a in arrays)
    )
    return waited


def test_a_few_steps_are_under_way_at_most(under_way, waited_for):
    for i in range(20):
        jax_ahead.hold_back({"loss": numpy.float32(i)})
    assert waited_for == list(range(12))
    assert len(under_way) == 8
    jax_ahead.forget_steps()
    assert not under_way


def test_all_that_a_step_returned_is_waited_for(under_way, waited_for):
    """Some of it may be what it was given, which is there already."""
    given = numpy.float32(-1)
    for i in range(9):
        jax_ahead.hold_back([given, numpy.float32(i)])
    assert waited_for == [-1, 0]


def test_large_outputs_are_not_kept(under_way, waited_for):
    kept = numpy.full(1000, 3.0)
    for i in range(8):
        jax_ahead.hold_back(kept if i == 3 else numpy.full(1000, float(i)))
    assert sum(find() is not None for step in under_way for find in step) == 1
    jax_ahead.hold_back(numpy.float32(8))
    assert waited_for == [3]


def test_what_a_later_step_freed_is_not_waited_for(under_way, waited_for):
    arrays = [numpy.float32(i) for i in range(20)]
    for before, array in zip([numpy.float32(-1), *arrays], arrays, strict=False):
        before.delete()
        jax_ahead.hold_back(array)
    assert waited_for == list(range(8, 20))


def test_a_step_that_returns_nothing_is_waited_for_itself(under_way, monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    jax_ahead.hold_back({}, state="state")
    assert waited == ["state"]
    assert not under_way


def test_a_program_that_is_traced_waits_for_nothing(under_way):
    @jax.jit
    def program(x):
        jax_ahead.hold_back(x)
        return x + 1

    assert float(program(1.0)) == 2.0
    assert not under_way
