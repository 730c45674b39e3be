"""Batch norm takes the statistics of the global batch, or those of a replica when told so."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono

MOMENTUM = 0.5


class MeanOfFirstHalf(keras.metrics.Metric):
    """The mean of the outputs of the batch's first half, which is the first replica's."""

    def __init__(self, name="first_half"):
        super().__init__(name=name)
        self.level = self.add_variable((), "zeros", name="level")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.level.assign(ops.mean(y_pred[: ops.shape(y_pred)[0] // 2]))

    def result(self):
        return self.level.value


def normalizing(**options):
    keras.utils.set_random_seed(3)
    norm = layers.BatchNormalization(momentum=MOMENTUM)
    model = keras.Sequential([keras.Input((1,)), norm])
    model = unisono.parallel(model, replicas=2, **options)
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[MeanOfFirstHalf()])
    return model, norm


def two_levels():
    """Eight rows: around 0 in the first half, around 10 in the second."""
    draw = np.random.default_rng(0)
    return (draw.normal(size=(8, 1)) + np.repeat([[0.0], [10.0]], 4, axis=0)).astype("float32")


def test_global_statistics_by_default():
    x = two_levels()
    model, norm = normalizing()
    logs = model.train_on_batch(x, x, return_dict=True)
    expected = (x[:4].mean() - x.mean()) / np.sqrt(x.var() + norm.epsilon)
    assert logs["first_half"] == pytest.approx(expected, abs=1e-5)
    moved = (1 - MOMENTUM) * x.mean()
    assert ops.convert_to_numpy(norm.moving_mean)[0] == pytest.approx(moved, abs=1e-5)
    moved = MOMENTUM + (1 - MOMENTUM) * x.var()
    assert ops.convert_to_numpy(norm.moving_variance)[0] == pytest.approx(moved, abs=1e-4)


def test_a_call_by_hand_after_training():
    x = two_levels()
    model, norm = normalizing()
    model.train_on_batch(x, x)
    y = ops.convert_to_numpy(model(ops.convert_to_tensor(x[:4]), training=True))
    expected = (x[:4] - x[:4].mean()) / np.sqrt(x[:4].var() + norm.epsilon)
    np.testing.assert_allclose(y, expected, atol=1e-5)


def test_statistics_of_a_replica_when_told_so():
    x = two_levels()
    model, norm = normalizing(sync_batch_norm=False)
    logs = model.train_on_batch(x, x, return_dict=True)
    assert logs["first_half"] == pytest.approx(0.0, abs=1e-5)
    # Whatever the replicas' own statistics become together, both halves have a spread near 1.
    variance = ops.convert_to_numpy(norm.moving_variance)[0]
    assert variance < MOMENTUM + (1 - MOMENTUM) * 4.0
