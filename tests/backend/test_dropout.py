"""Replicas draw masks of their own: no two rows of a batch share one, whichever replica has them.

What a replica drew shows in the gathered outputs, which a loss over the whole batch sees.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono

WIDTH = 512
RATE = 0.5


class Overlap(keras.metrics.Metric):
    """The largest share of equal entries between any two rows of the last batch."""

    def __init__(self, name="overlap"):
        super().__init__(name=name)
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        equal = ops.mean(ops.cast(y_pred[:, None] == y_pred[None, :], "float32"), axis=-1)
        self.largest.assign(ops.max(equal - 2.0 * ops.eye(ops.shape(y_pred)[0])))

    def result(self):
        return self.largest.value


class Rows(keras.metrics.Metric):
    """The rows of the last batch, as they were gathered."""

    def __init__(self, count, name="rows"):
        super().__init__(name=name)
        self.last = self.add_variable((count, WIDTH), "zeros", name="last")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.last.assign(y_pred)

    def result(self):
        return ops.mean(self.last.value)


def dropping(replicas, count):
    """A net that keeps or drops ones, and the metrics that watch it."""
    keras.utils.set_random_seed(3)
    scale = layers.Dense(WIDTH, use_bias=False, kernel_initializer="identity")
    model = keras.Sequential([keras.Input((WIDTH,)), scale, layers.Dropout(RATE)])
    model = unisono.parallel(model, replicas=replicas)
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Overlap(), Rows(count)])
    return model


def masks(model, count):
    """What one training step kept of ones, row by row, and the logs of the step."""
    ones = np.ones((count, WIDTH), "float32")
    logs = model.train_on_batch(ones, ones, return_dict=True)
    watched = next(m for m in model.metrics if m.name == "compile_metrics")
    rows = next(metric for metric in watched.metrics if metric.name == "rows")
    return ops.convert_to_numpy(rows.last), logs


@pytest.mark.parametrize("replicas", [2, 4])
def test_no_two_rows_share_a_mask(replicas):
    _, logs = masks(dropping(replicas, count=4), count=4)
    # Two independent masks of rate 1/2 agree on half of the entries; 0.7 is nine deviations off.
    assert 0.3 < float(logs["overlap"]) < 0.7


def test_rows_of_two_replicas_differ():
    rows, _ = masks(dropping(2, count=2), count=2)
    assert 0.3 < np.mean(rows[0] != rows[1]) < 0.7


def test_each_step_draws_new_masks():
    model = dropping(2, count=2)
    first, _ = masks(model, count=2)
    second, _ = masks(model, count=2)
    for before, after in zip(first, second, strict=True):
        assert 0.3 < np.mean(before != after) < 0.7


def test_expected_activations_are_kept():
    rows, _ = masks(dropping(2, count=8), count=8)
    assert set(np.unique(rows)) == {0.0, 1.0 / (1.0 - RATE)}
    assert np.mean(rows) == pytest.approx(1.0, abs=0.08)  # five deviations of 8 x 512 draws
    assert np.all(np.abs(rows.mean(axis=1) - 1.0) < 0.25)


def test_nothing_is_dropped_in_predict():
    ones = np.ones((5, WIDTH), "float32")
    model = dropping(2, count=2)
    np.testing.assert_array_equal(model.predict(ones, batch_size=3, verbose=0), ones)


def test_the_same_seed_draws_the_same_masks():
    first, _ = masks(dropping(2, count=4), count=4)
    second, _ = masks(dropping(2, count=4), count=4)
    np.testing.assert_array_equal(first, second)
