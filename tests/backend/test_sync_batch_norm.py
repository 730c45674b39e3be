"""`sync_batch_norm=False`: each replica normalizes by its own rows, and all keep the mean."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from twins import BACKEND, TOLERANCE, apart, fit, plain, rows, state

import unisono


class ByShares(layers.Layer):
    """The definition: rows are cut into shares in order, and each is normalized by itself."""

    def __init__(self, num_shares=2, momentum=0.9, epsilon=1e-3, **kwargs):
        super().__init__(**kwargs)
        self.num_shares, self.momentum, self.epsilon = num_shares, momentum, epsilon

    def build(self, shape):
        width = (shape[-1],)
        self.gamma = self.add_weight(shape=width, initializer="ones")
        self.beta = self.add_weight(shape=width, initializer="zeros")
        self.mean = self.add_weight(shape=width, initializer="zeros", trainable=False)
        self.variance = self.add_weight(shape=width, initializer="ones", trainable=False)

    def call(self, x, training=False):
        if not training:
            normal = (x - self.mean) * ops.rsqrt(self.variance + self.epsilon)
            return normal * self.gamma + self.beta
        axes = list(range(x.ndim - 1))
        parts, means, variances = [], [], []
        for part in ops.split(x, self.num_shares):
            mean, variance = ops.moments(part, axes=axes)
            parts.append((part - mean) * ops.rsqrt(variance + self.epsilon))
            means.append(mean)
            variances.append(variance)
        for variable, values in ((self.mean, means), (self.variance, variances)):
            average = sum(values) / len(values)
            variable.assign(variable * self.momentum + average * (1 - self.momentum))
        return ops.concatenate(parts) * self.gamma + self.beta


def model_with(norm, shape=(4,)):
    parts = [layers.Dense(5, activation="tanh"), norm, layers.Flatten(), layers.Dense(1)]
    return keras.Sequential([keras.Input(shape), *parts])


@pytest.mark.parametrize(("replicas", "shape"), [(2, (4,)), (3, (3, 4)), (2, (1, 3, 4))])
def test_statistics_are_those_of_the_definition(replicas, shape):
    x, y = rows()
    if len(shape) > 1:
        x = np.stack([x, x**2 + 1.0, -x], axis=1).reshape(-1, *shape)
    # The few rows of a share may be nearly equal: the epsilon keeps rounding from being divided
    # by next to nothing.
    norm = {"momentum": 0.9, "epsilon": 0.1}
    expected = plain(lambda: model_with(ByShares(replicas, **norm), shape))
    model = plain(lambda: model_with(layers.BatchNormalization(**norm), shape))
    unisono.parallel(model, replicas=replicas, sync_batch_norm=False)
    histories = [fit(one, x, y, epochs=2, batch_size=12) for one in (expected, model)]
    assert apart(*histories) <= TOLERANCE
    assert apart(state(expected), state(model)) <= TOLERANCE
    outputs = [one.predict(x, batch_size=8, verbose=0) for one in (expected, model)]
    assert apart(outputs[:1], outputs[1:]) <= TOLERANCE


def test_one_replica_is_plain_batch_norm():
    x, y = rows()
    expected, model = (plain(lambda: model_with(layers.BatchNormalization())) for _ in range(2))
    unisono.parallel(model, replicas=1, sync_batch_norm=False)
    fit(expected, x, y)
    fit(model, x, y)
    assert apart(expected, model) <= TOLERANCE


def test_the_choice_can_be_changed():
    x, y = rows()
    expected = plain(lambda: model_with(layers.BatchNormalization()))
    model = plain(lambda: model_with(layers.BatchNormalization()))
    unisono.parallel(model, replicas=2, sync_batch_norm=False)
    unisono.parallel(model, replicas=2)
    fit(expected, x, y)
    fit(model, x, y)
    assert apart(expected, model) <= TOLERANCE


@pytest.mark.skipif(BACKEND != "tensorflow", reason="Keras has `synchronized` on TensorFlow only")
@pytest.mark.parametrize("replicas", [1, 2])
def test_layers_that_ask_for_synchronization_themselves(replicas):
    x, y = rows(23)
    expected = plain(lambda: model_with(layers.BatchNormalization()))
    model = plain(lambda: model_with(layers.BatchNormalization(synchronized=True)))
    unisono.parallel(model, replicas=replicas)
    fit(expected, x, y, epochs=2)
    fit(model, x, y, epochs=2)
    assert apart(expected, model) <= TOLERANCE
    assert model.layers[1].get_config()["synchronized"] is True
