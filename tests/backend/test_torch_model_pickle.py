"""Models whose layers hold what torch's worker processes cannot simply be sent."""

import functools
import os
import threading
import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from twins import TOLERANCE, apart, plain, state

import unisono
from unisono.errors import ModelError

pytestmark = pytest.mark.skipif(keras.backend.backend() != "torch", reason="torch sends models")
ROWS = 23


def column(*values: int) -> Any:
    return np.random.default_rng(2).choice(values, size=(ROWS, 1))


TARGETS = np.random.default_rng(3).random((ROWS, 1)).astype("float32")


def with_lookup(**options: Any) -> Any:
    lookup = layers.IntegerLookup(output_mode="one_hot", **options)
    if not options:
        lookup.adapt(np.array([3, 5, 5, 7, 7, 7]))
    inputs = keras.Input((1,), dtype="int64")
    return keras.Model(inputs, layers.Dense(1)(lookup(inputs)))


class Tagged(keras.Model):
    """Keeps what made its inputs, and has strings looked up while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.words = layers.TextVectorization(vocabulary=["red", "green"])
        self.names = layers.StringLookup(vocabulary=["low", "high"], invert=True)
        self.dense = layers.Dense(1)

    def call(self, x: Any) -> Any:
        tokens = np.asarray(self.words(["green red red"]).cpu())
        names = np.asarray(self.names([1, 2]))
        return self.dense(x) * float(tokens.sum()) * len(names)


def feature_space() -> tuple[Any, Any]:
    import tensorflow as tf

    kinds = keras.utils.FeatureSpace
    space = kinds(
        {
            "color": kinds.integer_categorical(),
            "size": kinds.float_normalized(),
            "code": kinds.integer_hashed(num_bins=4),
            "age": kinds.float_discretized(num_bins=3),
        },
        crosses=[("color", "code")],
        crossing_dim=8,
        output_mode="concat",
    )
    draw = np.random.default_rng(4)
    x = {
        "color": column(3, 5, 7),
        "size": draw.random((ROWS, 1)).astype("float32"),
        "code": column(0, 1, 2, 3, 4, 5),
        "age": draw.random((ROWS, 1)).astype("float32"),
    }
    space.adapt(tf.data.Dataset.from_tensor_slices({name: part[:, 0] for name, part in x.items()}))
    return space, x


def trained(build: Callable[[], Any], x: Any, replicas: int | None) -> list[Any]:
    model = plain(build)
    if replicas is not None:
        unisono.parallel(model, replicas=replicas)
    history = model.fit(x, TARGETS, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return [*state(model), *history["loss"], model.predict(x, verbose=0)]


def behind_feature_space(space: Any) -> Any:
    return keras.Model(space.get_inputs(), layers.Dense(1)(space.get_encoded_features()))


@pytest.mark.parametrize("options", [{}, {"vocabulary": [3, 5, 7], "num_oov_indices": 2}])
def test_lookup_layers_reach_the_workers(options):
    x = column(3, 5, 7, 8, 9)
    build = functools.partial(with_lookup, **options)
    assert apart(trained(build, x, None), trained(build, x, 2)) < TOLERANCE


def test_layers_of_strings_reach_the_workers():
    x = np.random.default_rng(5).random((ROWS, 3)).astype("float32")
    assert apart(trained(Tagged, x, None), trained(Tagged, x, 2)) < TOLERANCE


def mixed() -> keras.Model:
    """Of a class that is pickled by value and uses `torch` and `keras.ops`, so torch.ops."""
    import torch

    class Mixed(layers.Layer):
        def call(self, x: Any) -> Any:
            return torch.relu(x) * keras.ops.cast(2, x.dtype)

    return keras.Sequential([keras.Input((3,)), layers.Dense(4), Mixed(), layers.Dense(1)])


def test_a_layer_that_uses_torch_and_ops_of_keras_reaches_the_workers():
    x = np.random.default_rng(5).random((ROWS, 3)).astype("float32")
    assert apart(trained(mixed, x, None), trained(mixed, x, 2)) < TOLERANCE


def test_a_model_behind_a_feature_space_reaches_the_workers():
    space, x = feature_space()
    build = functools.partial(behind_feature_space, space)
    assert apart(trained(build, x, None), trained(build, x, 2)) < TOLERANCE


class Augmenter:
    def __init__(self) -> None:
        self._draws = (number for number in range(3))


class Augment(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.augmenter = {"first": Augmenter()}

    def call(self, x: Any) -> Any:
        return x


def guarded() -> Any:
    guard = threading.Lock()

    def double(x: Any) -> Any:
        return x * 2 if not guard.locked() else x

    return layers.Lambda(double)


def with_default() -> Any:
    def same(x: Any, *, draws: Any = (number for number in range(3))) -> Any:
        return x

    return layers.Lambda(same)


def of_a_local_class() -> Any:
    holder = types.SimpleNamespace(draws=(number for number in range(3)))

    class Same(layers.Layer):
        def call(self, x: Any) -> Any:
            return x if holder is not None else None

    return Same()


class Logged(keras.losses.Loss):
    def __init__(self) -> None:
        super().__init__()
        self.file = open(os.devnull, "w")  # noqa: SIM115

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean((y_true - y_pred) ** 2, axis=-1)


@pytest.mark.parametrize(
    ("make", "loss", "path"),
    [
        (Augment, "mse", r"model\.layers\[1\]\.augmenter\['first'\]\._draws is a generator"),
        (guarded, "mse", r"model\.layers\[1\]\.function \(its variable 'guard'\) is a lock"),
        (with_default, "mse", r"layers\[1\]\.function \(its parameter 'draws'\) is a generator"),
        (
            of_a_local_class,
            "mse",
            r"model\.layers\[1\]\.call \(its variable 'holder'\)\.draws is a generator",
        ),
        (layers.ReLU, Logged, r"model\.\S*loss\S*\.file is a TextIOWrapper"),
    ],
)
def test_what_cannot_be_sent_is_named_by_its_path(make, loss, path):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2), make(), layers.Dense(1)])
    model.compile("sgd", loss if isinstance(loss, str) else loss())
    unisono.parallel(model, replicas=2)
    with pytest.raises(ModelError, match=path) as error:
        model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
    assert "unisono run" in str(error.value)
