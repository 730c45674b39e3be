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

from unisono.backends.jax import throttle as jax_ahead

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
    monkeypatch.setattr(jax_ahead, "_pace", jax_ahead._Pace())
    monkeypatch.setattr(jax_ahead, "keep_buffers_of_any_size", lambda: False)
    return steps


@pytest.fixture
def short_steps(under_way):
    jax_ahead._pace.are_long = False
    return under_way


def give_out(outputs):
    jax_ahead.await_turn()
    jax_ahead.note_step(outputs)


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


def test_a_few_steps_are_under_way_at_most(short_steps, waited_for):
    for i in range(20):
        give_out({"loss": numpy.float32(i)})
    assert waited_for == list(range(12))
    assert len(short_steps) == 8
    jax_ahead.forget_steps()
    assert not short_steps


def test_all_that_a_step_returned_is_waited_for(short_steps, waited_for):
    """Some of it may be what it was given, which is there already."""
    given = numpy.float32(-1)
    for i in range(9):
        give_out([given, numpy.float32(i)])
    assert waited_for == [-1, 0]


def test_large_outputs_are_not_kept(short_steps, waited_for):
    kept = numpy.full(1000, 3.0)
    for i in range(8):
        give_out(kept if i == 3 else numpy.full(1000, float(i)))
    assert sum(find() is not None for step in short_steps for find in step.results) == 1
    give_out(numpy.float32(8))
    assert waited_for == [3]


def test_what_a_later_step_freed_is_not_waited_for(short_steps, waited_for):
    arrays = [numpy.float32(i) for i in range(20)]
    for before, array in zip([numpy.float32(-1), *arrays], arrays, strict=False):
        jax_ahead.await_turn()
        before.delete()
        jax_ahead.note_step(array)
    assert waited_for == list(range(7, 19))


def test_a_step_that_returns_nothing_is_waited_for_itself(under_way, monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    jax_ahead.note_step({}, state="state")
    assert waited == ["state"]
    assert not under_way


def test_a_program_that_is_traced_waits_for_nothing(under_way):
    @jax.jit
    def program(x):
        give_out(x)
        return x + 1

    assert float(program(1.0)) == 2.0
    assert not under_way


class Step:
    """Results that are there after so many seconds of waiting, as seen by a clock."""

    nbytes = 4

    def __init__(self, clock, seconds, *, is_over=False):
        self._clock, self._seconds, self._is_over = clock, seconds, is_over

    def is_deleted(self):
        return False

    def is_ready(self):
        return self._is_over

    def wait(self):
        self._clock[0] += self._seconds


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(jax_ahead.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(jax_ahead.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(jax, "block_until_ready", lambda arrays: [a.wait() for a in arrays])
    monkeypatch.setattr(jax, "Array", Step)
    return now


def most_under_way(steps, under_way):
    most = 0
    for step in steps:
        give_out(step)
        most = max(most, len(under_way))
    return most


def test_of_long_steps_one_is_under_way(under_way, clock):
    assert most_under_way([Step(clock, 0.5) for _ in range(12)], under_way) == 1


def test_of_short_steps_some_are(under_way, clock):
    assert most_under_way([Step(clock, 0.05) for _ in range(12)], under_way) == 8


def test_steps_that_have_become_long_are_noticed(under_way, clock):
    give_out(Step(clock, 0.05))
    assert most_under_way([Step(clock, 0.05) for _ in range(12)], under_way) == 8
    give_out(Step(clock, 0.5))
    most_under_way([Step(clock, 0.5) for _ in range(12)], under_way)
    assert len(under_way) == 1


def test_a_step_that_was_over_already_tells_nothing(short_steps, clock):
    """A program that is slow itself finds it over, and it may have been short."""
    give_out(Step(clock, 0.0, is_over=True))
    clock[0] += 5.0
    assert most_under_way([Step(clock, 0.05, is_over=True) for _ in range(12)], short_steps) == 8


def test_after_a_failed_step_none_is_waited_for(under_way, clock):
    class Failed(Step):
        def wait(self):
            raise ValueError("failed")

    jax_ahead._pace.are_long = False
    for _ in range(8):
        give_out(Failed(clock, 0.05))
    with pytest.raises(ValueError, match="failed"):
        jax_ahead.await_turn()
    jax_ahead.await_turn()
    assert not under_way
