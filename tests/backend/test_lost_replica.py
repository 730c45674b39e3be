"""A replica's process dies or fails among others: that one is named, and not a neighbour."""

import os
import signal

import keras
import pytest
from twins import BACKEND, TOLERANCE, adopted, apart, fit, plain, rows

from unisono.errors import WorkerError

pytestmark = [
    pytest.mark.skipif(BACKEND != "torch", reason="only torch replicas are processes"),
    pytest.mark.slow,
]


def workers_of(model):
    return list(vars(model)["_unisono"]._peers._pool.workers)


def test_the_one_that_died_is_named():
    x, y = rows(24)
    model = adopted(replicas=3)
    fit(model, x, y)
    victim, other = workers_of(model)

    def kill(batch, logs):
        if batch == 1:
            os.kill(victim.pid, signal.SIGKILL)

    with pytest.raises(WorkerError) as caught:
        fit(model, x, y, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=kill)])
    began = f"Replica 1 (process {victim.pid}) was ended by SIGKILL."
    assert str(caught.value).startswith(began)
    assert "call fit again to go on" in str(caught.value)
    assert not other.is_alive


class Fails(keras.layers.Layer):
    """Raises where it sees the marked row, so on one replica only."""

    def call(self, inputs):
        if not keras.backend.is_keras_tensor(inputs) and float(inputs[..., 0].max()) > 1e6:
            raise FloatingPointError("a row that no layer likes")
        return inputs


def picky():
    layers = [keras.Input((4,)), Fails(), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def test_the_error_of_one_is_not_hidden_by_the_others():
    x, y = rows(24)
    expected, model = plain(picky), adopted(picky, replicas=3)
    fit(expected, x, y)
    fit(model, x, y)
    marked = x.copy()
    marked[-1, 0] = 1e7
    with pytest.raises(FloatingPointError, match="a row that no layer likes") as caught:
        fit(model, marked, y, batch_size=24)
    assert "Raised in replica 2:" in "".join(caught.value.__notes__)
    fit(expected, x, y)
    fit(model, x, y)
    assert apart(expected, model) < TOLERANCE
