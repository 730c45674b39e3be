"""A plain model and its parallel twin from the same weights, and how far apart they are."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from twins_data import fit as fit
from twins_data import rows as rows

import unisono

BACKEND = keras.backend.backend()
TOLERANCE = 1e-5
SEED = 7


def mlp() -> Any:
    hidden = keras.layers.Dense(5, activation="tanh", name="hidden")
    return keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1, name="out")])


def sgd() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, name="sgd")


def plain(build: Callable[[], Any] = mlp, *, optimizer: Callable[[], Any] = sgd, **options: Any):
    """A compiled model of plain Keras, with the same weights at each call."""
    keras.utils.set_random_seed(SEED)
    model = build()
    model.compile(**{"optimizer": optimizer(), "loss": "mse", **options})
    return model


def adopted(build: Callable[[], Any] = mlp, *, replicas: int = 2, **options: Any) -> Any:
    """A compiled model on several replicas, with the weights of `plain`."""
    return unisono.parallel(plain(build, **options), replicas=replicas)


@functools.cache
def trained(epochs: int, build: Callable[[], Any] = mlp) -> list[Any]:
    """The state of a plain model after `fit` on `rows()`."""
    model = plain(build)
    fit(model, *rows(), epochs=epochs)
    return state(model)


def twins(build: Callable[[], Any] = mlp, *, replicas: int = 2, **options: Any) -> tuple[Any, Any]:
    """A plain model and a parallel one with the same weights."""
    return plain(build, **options), adopted(build, replicas=replicas, **options)


def state(model: Any) -> list[Any]:
    """Every weight and optimizer variable as NumPy arrays."""
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.weights, *(optimizer.variables if optimizer else [])]
    return [keras.ops.convert_to_numpy(v) for v in variables]


def apart(expected: Any, actual: Any) -> float:
    """The largest difference of two lists of arrays, of two dicts of them, or of two models."""
    if isinstance(expected, keras.Model):
        expected, actual = state(expected), state(actual)
    if isinstance(expected, dict):
        assert list(expected) == list(actual)
        expected, actual = list(expected.values()), list(actual.values())
    pairs = list(zip(expected, actual, strict=True))
    assert pairs, "nothing was compared"
    return max(
        float(np.max(np.abs(np.asarray(a, "float64") - np.asarray(b, "float64")), initial=0.0))
        for a, b in pairs
    )
