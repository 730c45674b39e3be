"""Several inputs and outputs, and weights of outputs, samples, steps and classes."""

from typing import Any

import keras
import numpy as np
from keras import layers

from exactness.case import Adopt, Group, Results, to_numpy
from exactness.exercise import (
    GLOBAL_BATCH,
    NUM_CLASSES,
    NUM_FEATURES,
    NUM_STEPS,
    ROWS,
    TEST_ROWS,
    Task,
    classes,
    exercise,
    labels,
    mlp,
    numbers,
    row_weights,
    sgd,
    split,
    stacked,
    step_weights,
    train,
)

INPUTS = Group("Inputs and outputs")
WEIGHTS = Group("Weights of samples, classes and outputs")

MADE_DENSE = dict.fromkeys(("jax", "torch"), "Keras pads ragged tensors there, to the longest row")
LOSS_OF_EACH = {"near": "mse", "kind": "sparse_categorical_crossentropy"}


def two_parts() -> tuple[Any, Any]:
    """A functional trunk with two inputs and two outputs: the symbolic inputs, then outputs."""
    wide, ids = (
        keras.Input((NUM_FEATURES,), name="wide"),
        keras.Input((1,), name="ids", dtype="int32"),
    )
    both = layers.Concatenate()([wide, layers.Flatten()(layers.Embedding(NUM_CLASSES, 3)(ids))])
    hidden = layers.Dense(5, activation="tanh")(both)
    near = layers.Dense(2, name="near")(hidden)
    return (wide, ids), (near, layers.Dense(NUM_CLASSES, "softmax", name="kind")(hidden))


def two_part_data(*, as_dicts: bool) -> Task:
    x = {"wide": numbers(NUM_FEATURES), "ids": labels(1)}
    y = {"near": numbers(2, seed=1), "kind": labels(seed=2)}
    return split(x, y) if as_dicts else split(list(x.values()), list(y.values()))


@INPUTS.case("two inputs and two outputs, functional, `loss_weights`")
def two_functional(adopt: Adopt) -> Results:
    inputs, outputs = two_parts()
    return train(
        adopt(keras.Model(list(inputs), list(outputs))),
        two_part_data(as_dicts=False),
        loss=["mse", "sparse_categorical_crossentropy"],
        loss_weights=[0.3, 1.7],
        metrics=[["mae"], ["accuracy"]],
        test_batch=GLOBAL_BATCH,
    )


@INPUTS.case("dict inputs and dict outputs, functional, metrics by name")
def dicts_functional(adopt: Adopt) -> Results:
    (wide, ids), (near, kind) = two_parts()
    model = keras.Model({"wide": wide, "ids": ids}, {"near": near, "kind": kind})
    return train(
        adopt(model),
        two_part_data(as_dicts=True),
        loss=LOSS_OF_EACH,
        loss_weights={"near": 0.5, "kind": 2.0},
        metrics={"kind": ["accuracy"]},
        weighted_metrics={"near": ["mae"]},
    )


class TwoBranches(keras.Model):
    """Dict in, dict out, built by its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(4, activation="tanh")
        self.near = layers.Dense(2)
        self.kind = layers.Dense(NUM_CLASSES, activation="softmax")

    def call(self, inputs: Any) -> Any:
        hidden = self.hidden(inputs["wide"])
        return {"near": self.near(hidden), "kind": self.kind(inputs["other"])}


@INPUTS.case("dict inputs and dict outputs, subclassed and not built")
def dicts_subclassed(adopt: Adopt) -> Results:
    x = {"wide": numbers(NUM_FEATURES), "other": numbers(3)}
    task = split(x, {"near": numbers(2, seed=1), "kind": labels(seed=2)})
    return train(adopt(TwoBranches()), task, loss=LOSS_OF_EACH, metrics={"near": ["mae"]})


class Pair(keras.Model):
    """A tuple in, a tuple out."""

    def __init__(self) -> None:
        super().__init__()
        self.left = layers.Dense(3, activation="tanh")
        self.right = layers.Dense(3, activation="tanh")
        self.top = layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        left, right = inputs
        hidden = self.left(left) * self.right(right)
        return self.top(hidden), hidden


@INPUTS.case("tuple of inputs, one output without a loss, subclassed")
def pair(adopt: Adopt) -> Results:
    task = split((numbers(NUM_FEATURES), numbers(3)), (numbers(2, seed=1), numbers(3, seed=1)))
    return train(adopt(Pair()), task, loss=["mse", None])


@INPUTS.case("output without a loss, functional")
def output_without_loss(adopt: Adopt) -> Results:
    inputs, outputs = two_parts()
    return train(
        adopt(keras.Model(list(inputs), list(outputs))),
        two_part_data(as_dicts=False),
        loss=["mse", None],
        metrics=[["mae"], None],
    )


class RaggedRows(keras.Model):
    """Rows of any length in, the same scaled and a summary of each row out."""

    def __init__(self) -> None:
        super().__init__()
        self.top = layers.Dense(2)

    def build(self, input_shape: Any) -> None:
        self.scale = self.add_weight(shape=(3,), initializer="ones")
        self.top.build((None, 3))

    def call(self, inputs: Any) -> Any:
        import tensorflow as tf

        scaled = inputs * self.scale
        return scaled, self.top(tf.reduce_mean(scaled, axis=1))


def squares_of_all(y: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.square((y - y_pred).flat_values))


@INPUTS.case("ragged inputs, targets and outputs", unpromised=MADE_DENSE, sharpest=2)
def ragged(adopt: Adopt) -> Results:
    import tensorflow as tf

    lengths = 1 + np.arange(ROWS + TEST_ROWS) % NUM_STEPS
    values = numbers(NUM_STEPS, 3, seed=4).reshape(-1, 3)[: lengths.sum()]
    x = tf.RaggedTensor.from_row_lengths(values, lengths)
    task = split(x, (2.0 * x, numbers(2, seed=1)))
    results = train(adopt(RaggedRows()), task, loss=[squares_of_all, "mse"])
    scaled, summary = results["predict"]
    parts = [to_numpy(part) for part in (scaled.flat_values, scaled.row_lengths(), summary)]
    return results | {"predict": parts}


@WEIGHTS.case("`sample_weight`, one for each sample")
def sample_weight(adopt: Adopt) -> Results:
    weights = (row_weights(), row_weights(TEST_ROWS))
    return train(
        adopt(mlp()),
        weights=weights,
        test_batch=GLOBAL_BATCH,
        metrics=["mae"],
        weighted_metrics=["mse"],
    )


@WEIGHTS.case("`sample_weight`, one for each step")
def step_weight(adopt: Adopt) -> Results:
    model = stacked(layers.Dense(2), shape=(NUM_STEPS, 3))
    task = split(numbers(NUM_STEPS, 3), numbers(NUM_STEPS, 2, seed=1))
    weights = (step_weights(), step_weights(TEST_ROWS))
    return train(adopt(model), task, weights=weights, weighted_metrics=["mae"])


@WEIGHTS.case("`sample_weight` for each output, by name")
def sample_weight_by_output(adopt: Adopt) -> Results:
    (wide, ids), (near, kind) = two_parts()
    model = adopt(keras.Model({"wide": wide, "ids": ids}, {"near": near, "kind": kind}))
    weights = (weights_by_output(ROWS), weights_by_output(TEST_ROWS))
    return train(model, two_part_data(as_dicts=True), weights=weights, loss=LOSS_OF_EACH)


def weights_by_output(count: int) -> Any:
    return {"near": row_weights(count), "kind": row_weights(count)[::-1].copy()}


@WEIGHTS.case("`sample_weight` on a masked sequence")
def sample_weight_masked(adopt: Adopt) -> Results:
    x = numbers(NUM_STEPS, 3, seed=6)
    x[::2, 2:] = 0.0
    model = stacked(layers.Masking(), layers.Dense(2), shape=(NUM_STEPS, 3))
    weights = (step_weights(), step_weights(TEST_ROWS))
    task = split(x, numbers(NUM_STEPS, 2, seed=8))
    return train(adopt(model), task, weights=weights, weighted_metrics=["mae"])


@WEIGHTS.case("`class_weight`")
def class_weight(adopt: Adopt) -> Results:
    model = adopt(mlp(NUM_CLASSES, "softmax"))
    model.compile(sgd(), "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    return exercise(model, classes(), class_weight={0: 0.2, 1: 1.0, 2: 3.0, 3: 0.5})


@WEIGHTS.case("whole global batches of weight 0")
def weightless_batches(adopt: Adopt) -> Results:
    weights = row_weights()
    weights[12:24] = 0.0
    model = adopt(mlp())
    model.compile(sgd(), "mse", weighted_metrics=["mae"])
    return exercise(model, sample_weight=np.asarray(weights))
