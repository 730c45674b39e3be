"""Compiled losses, above all those that are not means of the samples' own losses."""

from typing import Any

import keras
from keras import losses, ops

from exactness.case import Adopt, Group, Results
from exactness.exercise import (
    ROWS,
    TEST_ROWS,
    binary,
    classes,
    mlp,
    regression,
    row_weights,
    sgd,
    train,
)

LOSSES = Group("Losses")


@LOSSES.case("cross-entropy with label smoothing, from logits")
def crossentropy(adopt: Adopt) -> Results:
    loss = losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    return train(adopt(mlp(4)), classes(one_hot=True), loss=loss, metrics=["accuracy"])


@LOSSES.case("custom loss class, defined in a function")
def custom_class(adopt: Adopt) -> Results:
    class Quantile(keras.losses.Loss):
        def __init__(self, quantile: float) -> None:
            super().__init__()
            self.quantile = quantile

        def call(self, y_true: Any, y_pred: Any) -> Any:
            error = y_true - y_pred
            return ops.mean(ops.maximum(self.quantile * error, (self.quantile - 1) * error), -1)

    return train(adopt(mlp()), loss=Quantile(0.8))


@LOSSES.case("custom function with a value for each sample")
def function_of_samples(adopt: Adopt) -> Results:
    def fourth_power(y_true: Any, y_pred: Any) -> Any:
        return ops.mean((y_true - y_pred) ** 4, axis=-1)

    return train(adopt(mlp()), loss=fourth_power, optimizer=keras.optimizers.SGD(0.02))


@LOSSES.case("custom function with a value for each element")
def function_of_elements(adopt: Adopt) -> Results:
    return train(adopt(mlp()), loss=lambda y_true, y_pred: ops.abs(y_true - y_pred) ** 1.5)


@LOSSES.case("Dice, over all elements of the batch")
def dice(adopt: Adopt) -> Results:
    return train(adopt(mlp(1, "sigmoid")), binary(), loss=losses.Dice())


@LOSSES.case("Dice with sample weights")
def dice_weighted(adopt: Adopt) -> Results:
    weights = (row_weights(), row_weights(TEST_ROWS))
    return train(adopt(mlp(1, "sigmoid")), binary(), weights=weights, loss=losses.Dice())


@LOSSES.case("contrastive function over the pairs of the batch")
def contrastive(adopt: Adopt) -> Results:
    return train(adopt(mlp(3)), classes(), loss=same_label_attracts)


def same_label_attracts(y_true: Any, y_pred: Any) -> Any:
    """Cross-entropy of each row's similarities against the rows of its label."""
    unit = y_pred / ops.sqrt(ops.sum(y_pred**2, axis=-1, keepdims=True) + 1e-3)
    y_true = ops.reshape(y_true, (-1, 1))
    same = ops.cast(ops.equal(y_true, ops.transpose(y_true)), "float32")
    log_chance = ops.log_softmax(ops.matmul(unit, ops.transpose(unit)) / 0.5, axis=-1)
    return -ops.mean(ops.sum(same * log_chance, axis=-1) / ops.sum(same, axis=-1))


@LOSSES.case("function of the batch's correlation")
def correlation(adopt: Adopt) -> Results:
    def decorrelated(y_true: Any, y_pred: Any) -> Any:
        a, b = y_true - ops.mean(y_true, axis=0), y_pred - ops.mean(y_pred, axis=0)
        spread = ops.sqrt(ops.sum(a * a) * ops.sum(b * b) + 1e-3)
        return 1.0 - ops.sum(a * b) / spread

    return train(adopt(mlp()), loss=decorrelated)


@LOSSES.case('`reduction="sum"`')
def reduction_sum(adopt: Adopt) -> Results:
    loss = losses.MeanSquaredError(reduction="sum")
    return train(adopt(mlp()), loss=loss, optimizer=keras.optimizers.SGD(0.01))


@LOSSES.case('`reduction="sum"` with sample weights')
def reduction_sum_weighted(adopt: Adopt) -> Results:
    loss = losses.MeanSquaredError(reduction="sum")
    weights = (row_weights(), row_weights(TEST_ROWS))
    return train(adopt(mlp()), weights=weights, loss=loss, optimizer=keras.optimizers.SGD(0.005))


@LOSSES.case('`reduction="mean_with_sample_weight"`')
def mean_with_sample_weight(adopt: Adopt) -> Results:
    loss = losses.MeanSquaredError(reduction="mean_with_sample_weight")
    weights = (row_weights(), row_weights(TEST_ROWS))
    return train(adopt(mlp()), weights=weights, loss=loss)


@LOSSES.case('`reduction="mean_with_sample_weight"`, slices whose weights are all 0')
def mean_with_zero_weights(adopt: Adopt) -> Results:
    loss = losses.MeanSquaredError(reduction="mean_with_sample_weight")
    weights = row_weights(ROWS + TEST_ROWS)
    for first in range(4):  # the first third of each global batch of 12
        weights[first::12] = 0.0
    return train(adopt(mlp()), weights=(weights[:ROWS], weights[ROWS:]), loss=loss)


class Halved(keras.Model):
    """Computes its loss by itself, as the Keras guides do with `compute_loss`."""

    def __init__(self) -> None:
        super().__init__()
        self.top = keras.layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        return self.top(inputs)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        return 0.5 * ops.mean(ops.square(y_pred - y)) + sum(self.losses)


@LOSSES.case("own `compute_loss`, a mean over the batch")
def own_compute_loss(adopt: Adopt) -> Results:
    model = adopt(Halved())
    return train(model, regression(), optimizer=sgd(), loss=None, metrics=["mae"])
