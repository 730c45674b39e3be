"""Kinds of models: not built yet, subclassed, nested, with layers used twice."""

from typing import Any

import keras
from keras import layers

from exactness.case import Adopt, Group, Results
from exactness.exercise import NUM_FEATURES, images, mlp, numbers, regression, split, stacked, train

MODELS = Group("Kinds of models")


class Perceptron(keras.Model):
    """Subclassed; built by its first call."""

    def __init__(self, units: int = 5) -> None:
        super().__init__()
        self.hidden = layers.Dense(units, use_bias=False)
        self.norm = layers.BatchNormalization(momentum=0.8)
        self.top = layers.Dense(2)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.top(keras.ops.tanh(self.norm(self.hidden(inputs), training=training)))


@MODELS.case("subclassed, not built")
def subclassed(adopt: Adopt) -> Results:
    return train(adopt(Perceptron()))


class Remembering(keras.Model):
    """Keeps a tensor in an attribute while batch norm asks all replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(4, activation="tanh")
        self.norm = layers.BatchNormalization(momentum=0.8)
        self.top = layers.Dense(2)
        self.kept: Any = []

    def call(self, inputs: Any, training: bool = False) -> Any:
        self.before = self.hidden(inputs)
        self.kept.append(keras.ops.square(self.before))
        normed = self.norm(self.before, training=training)
        return self.top(normed + self.before + self.kept.pop())


@MODELS.case("subclassed, tensors kept in attributes across batch norm")
def kept_in_attributes(adopt: Adopt) -> Results:
    return train(adopt(Remembering()))


@MODELS.case("subclassed, built by a call, class defined in a function")
def subclassed_built(adopt: Adopt) -> Results:
    class Local(Perceptron):
        def call(self, inputs: Any, training: bool = False) -> Any:
            return 2.0 * super().call(inputs, training=training)

    model = Local()
    model(regression().x[:2])
    return train(adopt(model))


@MODELS.case("Sequential without an input shape")
def sequential_unbuilt(adopt: Adopt) -> Results:
    return train(adopt(keras.Sequential([layers.Dense(5, "tanh"), layers.Dense(2)])))


@MODELS.case("model within a model, with batch norm")
def nested(adopt: Adopt) -> Results:
    inner = stacked(layers.Dense(4, use_bias=False), layers.BatchNormalization(), shape=(6,))
    inputs = keras.Input((NUM_FEATURES,))
    outputs = layers.Dense(2)(layers.Activation("tanh")(inner(inputs)))
    return train(adopt(keras.Model(inputs, outputs)))


@MODELS.case("layer used twice")
def used_twice(adopt: Adopt) -> Results:
    shared = layers.Dense(NUM_FEATURES, activation="tanh")
    inputs = keras.Input((NUM_FEATURES,))
    return train(adopt(keras.Model(inputs, layers.Dense(2)(shared(shared(inputs))))))


@MODELS.case("residual convolutions with several batch norms")
def residual(adopt: Adopt) -> Results:
    inputs = keras.Input((6, 6, 2))
    branch = layers.Conv2D(2, 3, padding="same", use_bias=False)(inputs)
    branch = layers.ReLU()(layers.BatchNormalization()(branch))
    branch = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(branch)
    joined = layers.Add()([inputs, layers.BatchNormalization()(branch)])
    pooled = layers.GlobalAveragePooling2D()(layers.MaxPooling2D()(joined))
    model = keras.Model(inputs, layers.Dense(4, activation="softmax")(pooled))
    return train(adopt(model), images(), loss="sparse_categorical_crossentropy")


@MODELS.case("inputs of unknown length")
def unknown_length(adopt: Adopt) -> Results:
    model = stacked(
        layers.Conv1D(3, 2), layers.GlobalMaxPooling1D(), layers.Dense(2), shape=(None, 3)
    )
    return train(adopt(model), split(numbers(5, 3), numbers(2, seed=2)))


@MODELS.case("scalar targets of shape (rows,)")
def scalar_targets(adopt: Adopt) -> Results:
    task = regression(1)
    flat = task._replace(y=task.y[:, 0], y_test=task.y_test[:, 0])
    return train(adopt(mlp(1)), flat, metrics=["mae"])
