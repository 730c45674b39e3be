"""Losses that layers add: regularizers and `add_loss`.

On TensorFlow and torch they count as means over the batch; on JAX any loss is exact.
"""

from typing import Any

from keras import layers, ops, regularizers

from unisono.bench.case import Adopt, Group, Results
from unisono.bench.exercise import exercise, sgd, stacked, train
from unisono.bench.tasks import NUM_FEATURES, Task, regression

EXTRA_LOSSES = Group("Losses added by layers")
BATCH_MEANS = "`add_loss` counts as a batch mean there; this one is a sum over the batch"


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


@EXTRA_LOSSES.case(
    "`add_loss`, a sum over the batch",
    unpromised={"tensorflow": BATCH_MEANS, "torch": BATCH_MEANS},
)
def add_loss_sum(adopt: Adopt) -> Results:
    return train(adopt(penalized(ops.sum)))


@EXTRA_LOSSES.case("`add_loss` as the only loss")
def add_loss_only(adopt: Adopt) -> Results:
    model = adopt(penalized(ops.mean))
    model.compile(sgd())
    task = regression()
    return exercise(model, Task(task.x, None, task.x_test, None), validation_data=None)
