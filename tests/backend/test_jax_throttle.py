"""The deadlock guard of CPU devices: with too many steps in flight, XLA's threads block."""

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

from unisono.backends.jax import throttle

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


def test_many_steps_of_more_replicas_than_cores():
    env = {**os.environ, "KERAS_BACKEND": "jax"}
    words = [sys.executable, "-c", MANY_STEPS]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("(20480, 10)\n")


@pytest.fixture
def in_flight(monkeypatch):
    steps: deque = deque()
    monkeypatch.setattr(throttle, "_in_flight", steps)
    return steps


@pytest.fixture
def waited_for(monkeypatch):
    """The numbers that were waited for, in order."""
    waited = []
    monkeypatch.setattr(
        jax, "block_until_ready", lambda arrays: waited.extend(float(a.max()) for a in arrays)
    )
    return waited


def dispatch(outputs):
    throttle.await_turn()
    throttle.note_step(outputs)


def test_all_outputs_of_the_first_of_eight_steps_are_waited_for(in_flight, waited_for):
    """Some of them may be arguments of the step, which are ready already."""
    given = numpy.float32(-1)
    for i in range(10):
        dispatch([given, numpy.float32(i)])
    assert waited_for == [-1, 0, -1, 1]
    assert len(in_flight) == 8


def test_large_outputs_are_not_kept(in_flight, waited_for):
    kept = numpy.full(1000, 3.0)
    for i in range(8):
        dispatch(kept if i == 3 else numpy.full(1000, float(i)))
    dispatch(numpy.float32(8))
    assert waited_for == [3]


def test_what_a_later_step_freed_is_not_waited_for(in_flight, waited_for):
    arrays = [numpy.float32(i) for i in range(20)]
    for before, array in zip([numpy.float32(-1), *arrays], arrays, strict=False):
        throttle.await_turn()
        before.delete()
        throttle.note_step(array)
    assert waited_for == list(range(7, 19))


def test_the_state_is_waited_for_if_a_step_returns_nothing_else(in_flight, waited_for):
    throttle.note_step({}, state=[numpy.float32(5)])
    assert waited_for == [5]
    assert not in_flight


def test_a_program_that_is_traced_waits_for_nothing(in_flight):
    @jax.jit
    def program(x):
        dispatch(x)
        return x + 1

    assert float(program(1.0)) == 2.0
    assert not in_flight


def test_after_a_failed_step_none_is_waited_for(in_flight, monkeypatch):
    def fail(arrays):
        raise ValueError("failed")

    monkeypatch.setattr(jax, "block_until_ready", fail)
    for i in range(8):
        dispatch(numpy.float32(i))
    with pytest.raises(ValueError, match="failed"):
        throttle.await_turn()
    assert not in_flight
