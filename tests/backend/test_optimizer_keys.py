"""Optimizers that keep records of variables by key: the keys change when a model is adopted."""

import keras
import pytest
from twins import TOLERANCE, apart, fit, mlp, plain, rows

import unisono

optimizers = keras.optimizers


def excluding(model):
    optimizer = optimizers.AdamW(0.05, weight_decay=0.3)
    optimizer.exclude_from_weight_decay(var_list=[model.layers[0].kernel])
    return optimizer


def scaled(model):
    return optimizers.LossScaleOptimizer(excluding(model), initial_scale=16.0)


def several(model):
    adam, sgd = optimizers.Adam(0.02), optimizers.SGD(0.05)
    return optimizers.MultiOptimizer(lambda variable: adam if "kernel" in variable.path else sgd)


def compiled(optimizer):
    model = plain(mlp)
    model.compile(optimizer(model), "mse")
    return model


@pytest.mark.parametrize(
    ("optimizer", "epochs_before"), [(excluding, 0), (scaled, 1), (several, 0), (several, 1)]
)
def test_records_by_key_stay_right(optimizer, epochs_before):
    x, y = rows()
    expected = compiled(optimizer)
    fit(expected, x, y, epochs=3)
    model = compiled(optimizer)
    fit(model, x, y, epochs=epochs_before)
    unisono.parallel(model, replicas=2)
    fit(model, x, y, epochs=2 - epochs_before)
    assert unisono.release(model) is model
    fit(model, x, y, epochs=1)
    assert apart(expected, model) < TOLERANCE
