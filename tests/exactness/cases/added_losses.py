"""Losses that layers add, and a model's own `compute_loss`: means and sums over the batch."""

from typing import Any

import keras
from keras import layers, ops, regularizers

from exactness.case import Adopt, Group, Results
from exactness.exercise import NUM_FEATURES, Task, exercise, regression, sgd, stacked, train

EXTRA_LOSSES = Group("Losses added by layers")


@EXTRA_LOSSES.case("kernel and bias regularizers")
def regularizers_of_weights(adopt: Adopt) -> Results:
    model = stacked(
        layers.Dense(5, "tanh", kernel_regularizer=regularizers.L2(0.05)),
        layers.Dense(2, bias_regularizer=regularizers.L1(0.05)),
        shape=(NUM_FEATURES,),
    )
    return train(adopt(model))


@EXTRA_LOSSES.case("activity regularizer")
def activity_regularizer(adopt: Adopt) -> Results:
    model = stacked(
        layers.Dense(5, "tanh", activity_regularizer=regularizers.L2(0.1)),
        layers.Dense(2),
        shape=(NUM_FEATURES,),
    )
    return train(adopt(model))


class Penalty(layers.Layer):
    """Passes its input on and adds a loss of it."""

    def __init__(self, reduce: Any = ops.mean, **options: Any) -> None:
        super().__init__(**options)
        self.reduce = reduce

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * self.reduce(ops.square(inputs)))
        return inputs


def penalized(reduce: Any) -> Any:
    return stacked(layers.Dense(5, "tanh"), Penalty(reduce), layers.Dense(2), shape=(NUM_FEATURES,))


@EXTRA_LOSSES.case("`add_loss`, a mean over the batch")
def add_loss(adopt: Adopt) -> Results:
    return train(adopt(penalized(ops.mean)), metrics=["mae"])


@EXTRA_LOSSES.case("`add_loss` and an activity regularizer before batch norm")
def add_loss_batch_norm(adopt: Adopt) -> Results:
    model = stacked(
        layers.Dense(5, "tanh", activity_regularizer=regularizers.L2(0.1)),
        Penalty(),
        layers.BatchNormalization(epsilon=0.1),
        layers.Dense(2),
        shape=(NUM_FEATURES,),
    )
    return train(adopt(model), metrics=["mae"])


@EXTRA_LOSSES.case("`add_loss`, a sum over the batch")
def add_loss_sum(adopt: Adopt) -> Results:
    return train(adopt(penalized(ops.sum)), optimizer=slow())


def of_each_row(values: Any) -> Any:
    return ops.sum(values, axis=-1)


@EXTRA_LOSSES.case("`add_loss` of a vector, a value for each row, which Keras sums")
def add_loss_vector(adopt: Adopt) -> Results:
    return train(adopt(penalized(of_each_row)), optimizer=slow())


@EXTRA_LOSSES.case("`add_loss` of a mean and of a sum, and regularizers, in one model")
def add_loss_mixed(adopt: Adopt) -> Results:
    model = stacked(
        layers.Dense(5, "tanh", kernel_regularizer=regularizers.L2(0.05)),
        Penalty(ops.sum),
        Penalty(ops.mean),
        layers.BatchNormalization(epsilon=0.1),
        layers.Dense(2, activity_regularizer=regularizers.L2(0.1)),
        shape=(NUM_FEATURES,),
    )
    return train(adopt(model), optimizer=slow(), metrics=["mae"])


@EXTRA_LOSSES.case("`add_loss` as the only loss")
def add_loss_only(adopt: Adopt) -> Results:
    model = adopt(penalized(ops.mean))
    model.compile(sgd())
    task = regression()
    return exercise(model, Task(task.x, None, task.x_test, None), validation_data=None)


class Summing(keras.Model):
    """A functional model whose loss is the sum over the batch."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        return ops.sum(ops.square(y - y_pred))


class SummingToo(Summing):
    """The same beside a compiled loss and the losses of layers."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        others = keras.Model.compute_loss(self, x, y, y_pred, sample_weight)
        return 0.1 * super().compute_loss(x, y, y_pred) + others


@EXTRA_LOSSES.case("`compute_loss` that sums over the batch", sharpest=3)
def compute_loss_sum(adopt: Adopt) -> Results:
    inputs = keras.Input((NUM_FEATURES,))
    hidden = layers.BatchNormalization()(layers.Dense(5, use_bias=False)(inputs))
    model = Summing(inputs, layers.Dense(2)(layers.Activation("tanh")(hidden)))
    return train(adopt(model), optimizer=slow(), metrics=["mae"])


@EXTRA_LOSSES.case("`compute_loss` that adds a sum to a compiled loss, regularizers and `add_loss`")
def compute_loss_mixed(adopt: Adopt) -> Results:
    inputs = keras.Input((NUM_FEATURES,))
    hidden = layers.Dense(5, "tanh", kernel_regularizer=regularizers.L2(0.05))(inputs)
    hidden = Penalty(ops.mean)(Penalty(ops.sum)(hidden))
    model = SummingToo(inputs, layers.Dense(2)(hidden))
    return train(adopt(model), optimizer=slow())


class SummingBesideLittle(Summing):
    """A sum, and regularizers that are small beside it."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        return super().compute_loss(x, y, y_pred) + sum(self.losses)


@EXTRA_LOSSES.case("`compute_loss` that sums, and a small regularizer")
def compute_loss_sum_regularized(adopt: Adopt) -> Results:
    inputs = keras.Input((NUM_FEATURES,))
    hidden = layers.Dense(5, "tanh", kernel_regularizer=regularizers.L2(0.01))(inputs)
    return train(adopt(SummingBesideLittle(inputs, layers.Dense(2)(hidden))), optimizer=slow())


@EXTRA_LOSSES.case("`compute_loss` that sums, with loss scaling, accumulation and clipping")
def compute_loss_sum_scaled(adopt: Adopt) -> Results:
    inputs = keras.Input((NUM_FEATURES,))
    model = Summing(inputs, layers.Dense(2)(layers.Dense(5, "tanh")(inputs)))
    optimizer = keras.optimizers.SGD(
        0.01, loss_scale_factor=8.0, gradient_accumulation_steps=2, global_clipnorm=2.0
    )
    has_graph = keras.backend.backend() != "torch"  # Keras takes one step at a time there.
    return train(adopt(model), optimizer=optimizer, steps_per_execution=2 if has_graph else 1)


def slow() -> Any:
    """For sums, whose gradients are larger by the number of rows."""
    return keras.optimizers.SGD(0.003, momentum=0.9)
