"""Gradients in several buckets that are reduced while backward runs: as exact as one device."""

import keras
import numpy as np
import pytest
from keras import layers
from twins import BACKEND, TOLERANCE, apart, fit, twins

if BACKEND != "torch":
    pytest.skip("on torch gradients are reduced in buckets", allow_module_level=True)

import torch

from unisono.backends.torch.buckets import FIRST_BUCKET_BYTES

WIDTH = 520  # A layer of this width fills a bucket.
NUM_ROWS = 24


def rows():
    """The first half of each batch of 8 has a positive first feature, in every other batch."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, 6)).astype("float32")
    place = np.arange(NUM_ROWS)
    x[:, 0] = np.where((place % 8 < 4) & (place // 8 % 2 == 0), 1.0, -1.0)
    return x, rng.normal(size=(NUM_ROWS, 1)).astype("float32")


class OfSomeRows(layers.Layer):
    """Adds a branch to the rows whose first feature is positive: on some replicas it has none."""

    def __init__(self):
        super().__init__()
        self.branch = layers.Dense(WIDTH, activation="tanh")

    def build(self, shapes):
        self.branch.build(shapes[0])

    def call(self, inputs):
        hidden, features = inputs
        chosen = torch.nonzero(features[:, 0] > 0).flatten()
        if not len(chosen):
            return hidden
        return hidden.index_add(0, chosen, self.branch(hidden[chosen]))

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs[0].shape, inputs[0].dtype)


def branched():
    features = keras.Input((6,))
    hidden = layers.Dense(WIDTH, activation="tanh")(features)
    hidden = layers.BatchNormalization(epsilon=0.1)(hidden)
    hidden = OfSomeRows()([hidden, features])
    hidden = layers.BatchNormalization(epsilon=0.1)(layers.Dense(WIDTH)(hidden))
    return keras.Model(features, layers.Dense(1)(hidden))


class Recomputed(layers.Layer):
    """Uses one kernel twice; once in a backward pass that runs inside the backward pass."""

    def __init__(self):
        super().__init__()
        self.shared = layers.Dense(WIDTH, activation="tanh")

    def build(self, shape):
        self.shared.build(shape)

    def call(self, x):
        if isinstance(x, keras.KerasTensor) or x.device.type == "meta":
            return self.shared(x)
        inner = torch.utils.checkpoint.checkpoint(self.shared, self.shared(x), use_reentrant=True)
        return inner + 0.0 * x

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


def recomputed():
    hidden = layers.Dense(WIDTH, activation="tanh")
    return keras.Sequential([keras.Input((6,)), hidden, Recomputed()])


def small_steps():
    return keras.optimizers.SGD(1e-4, momentum=0.9)  # A wide net diverges with more.


@pytest.mark.parametrize(("build", "replicas"), [(branched, 2), (branched, 3), (recomputed, 2)])
def test_agrees_with_one_device(build, replicas):
    x, y = rows()
    y = y if build is branched else np.tile(y, (1, WIDTH))
    expected, model = twins(build, replicas=replicas, optimizer=small_steps)
    for each in (expected, model):
        # Twice: the buckets are made in the first step and used from the second on.
        fit(each, x, y, batch_size=8, epochs=2)
        fit(each, x, y, batch_size=8)
    assert apart(expected, model) <= TOLERANCE
    sizes = [v.value.nbytes for v in model.trainable_variables]
    assert sum(size >= FIRST_BUCKET_BYTES for size in sizes) >= 1


def test_a_gradient_after_the_step_is_that_of_the_global_batch():
    x, y = rows()
    expected, model = twins(branched, optimizer=small_steps)
    for each in (expected, model):
        fit(each, x[:8], y[:8], batch_size=8, epochs=2)
    pairs = zip(expected.trainable_variables, model.trainable_variables, strict=True)
    for one, other in pairs:
        assert apart([one.value.grad], [other.value.grad]) <= TOLERANCE
