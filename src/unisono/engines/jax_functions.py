"""The functions that Keras' JAX trainer compiles from a model's steps, made for replicas."""

from collections.abc import Callable
from typing import Any

import keras

from unisono.engines.batch_norm import batch_norms, group_statistics, ungroup_statistics
from unisono.engines.hooks import bind, original, unbind

_FUNCTIONS = ("train_function", "test_function", "predict_function")


def bind_makers(model: keras.Model, num_groups: int) -> None:
    """Have batch norms take statistics of `num_groups` groups of rows in what is made from now."""
    for function in _FUNCTIONS:
        bind(model, f"make_{function}", _maker(model, function, num_groups))


def unbind_makers(model: keras.Model) -> None:
    """Give the functions and batch norms back to plain Keras."""
    unbind(model, *(f"make_{function}" for function in _FUNCTIONS))
    for layer in batch_norms(model):
        ungroup_statistics(layer)


def rebuild_functions(model: keras.Model) -> None:
    """Forget compiled steps, so that the next call traces them for the present devices."""
    for function in _FUNCTIONS:
        setattr(model, function, None)


def _maker(model: keras.Model, function: str, num_groups: int) -> Callable[..., Any]:
    def make(force: bool = False) -> Any:
        if getattr(model, function) is None or force:
            for layer in batch_norms(model):
                group_statistics(layer, num_groups)
        return original(model, f"make_{function}")(force=force)

    return make
