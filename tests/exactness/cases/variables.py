"""Variables that are frozen, get no gradient, or change in the forward pass."""

from typing import Any

import keras
from keras import layers, ops, optimizers

from exactness.case import Adopt, Group, Results
from exactness.exercise import (
    GLOBAL_BATCH,
    NUM_CLASSES,
    NUM_FEATURES,
    classes,
    regression,
    stacked,
    train,
)

VARIABLES = Group("Frozen, unused and stateful variables")


@VARIABLES.case("frozen layer")
def frozen_layer(adopt: Adopt) -> Results:
    frozen = layers.Dense(5, "tanh", trainable=False)
    model = stacked(frozen, layers.Dense(2), shape=(NUM_FEATURES,))
    return train(adopt(model), optimizer=optimizers.Adam(0.01))


@VARIABLES.case("layer frozen between two fits")
def frozen_later(adopt: Adopt) -> Results:
    model = adopt(stacked(layers.Dense(5, "tanh"), layers.Dense(2), shape=(NUM_FEATURES,)))
    first = train(model)
    model.layers[0].trainable = False
    return {"first": first, "second": train(model)}


class Unused(keras.Model):
    """Has a branch that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(5, "tanh")
        self.unused = layers.Dense(3)
        self.top = layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        self.unused(inputs)
        return self.top(self.hidden(inputs))


@VARIABLES.case("branch that never gets a gradient")
def no_gradient(adopt: Adopt) -> Results:
    return train(adopt(Unused()), optimizer=optimizers.Adam(0.01))


class Switched(keras.Model):
    """Takes one of two branches, as the first feature of the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.left = layers.Dense(2)
        self.right = layers.Dense(2)

    def build(self, shape: Any) -> None:
        self.left.build(shape)
        self.right.build(shape)

    def call(self, inputs: Any) -> Any:
        left = inputs[0, 0] > 0
        return ops.cond(left, lambda: self.left(inputs), lambda: self.right(inputs))


@VARIABLES.case("branch without a gradient in some steps")
def no_gradient_sometimes(adopt: Adopt) -> Results:
    task = regression()
    task.x[:, 0] = sign_of_batch(len(task.x))
    task.x_test[:, 0] = sign_of_batch(len(task.x_test))
    adam = optimizers.Adam(0.01)
    return train(adopt(Switched()), task, test_batch=GLOBAL_BATCH, optimizer=adam)


def sign_of_batch(count: int) -> Any:
    """1 for the rows of even global batches, -1 for those of odd ones."""
    return [1.0 if (row // GLOBAL_BATCH) % 2 == 0 else -1.0 for row in range(count)]


class StepCounter(layers.Layer):
    """Counts its training calls and scales by the count."""

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(initializer="ones", trainable=False, name="count")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.count.assign_add(1.0)
        return inputs / ops.sqrt(self.count)


@VARIABLES.case("layer that counts its calls")
def step_counter(adopt: Adopt) -> Results:
    model = stacked(layers.Dense(5, "tanh"), StepCounter(), layers.Dense(2), shape=(NUM_FEATURES,))
    return train(adopt(model))


@VARIABLES.case("Normalization layer adapted beforehand")
def adapted(adopt: Adopt) -> Results:
    task = classes()
    scale = layers.Normalization()
    scale.adapt(task.x)
    model = stacked(scale, layers.Dense(NUM_CLASSES, "softmax"), shape=(NUM_FEATURES,))
    return train(adopt(model), task, loss="sparse_categorical_crossentropy")
