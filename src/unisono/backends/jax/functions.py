"""The functions that Keras' JAX trainer compiles from a model's steps, made for replicas."""

from collections.abc import Callable, Mapping
from typing import Any

import keras

from unisono.backends.jax.batch_norm import Mesh, gather_statistics
from unisono.backends.jax.cpu_layers import leave_kernels, use_kernels
from unisono.devices import Placement
from unisono.hooks import bind, original, unbind
from unisono.replication.batch_norm import batch_norms, group_statistics, ungroup_statistics

_FUNCTIONS = ("train_function", "test_function", "predict_function")


def bind_makers(
    model: keras.Model,
    placement: Placement,
    mesh: Callable[[], Mesh],
    steps: Mapping[str, Callable[[], Callable[..., Any]]],
    *,
    sync_batch_norm: bool,
) -> None:
    """Have what is made from now compute in ways for these replicas, whose mesh is `mesh()`.

    `steps` makes the model's steps, by their names. JAX remembers what it compiled of a function,
    so each function that Keras makes gets a step of its own: after another `compile` nothing of the
    loss and the metrics before it may be left. Without `sync_batch_norm` each replica's rows are
    normalized by their own statistics.
    """

    def prepare() -> None:
        for name, make_step in steps.items():
            bind(model, name, make_step())
        num_replicas = placement.num_replicas
        is_compiled = bool(model.jit_compile and not model.run_eagerly)
        for layer in batch_norms(model):
            group_statistics(layer, 1 if sync_batch_norm else num_replicas)
            if sync_batch_norm and num_replicas > 1 and is_compiled:
                gather_statistics(layer, num_replicas, mesh())
        if placement.kind == "cpu":
            use_kernels(model, num_replicas=num_replicas)

    for name, make_step in steps.items():
        bind(model, name, make_step())
    for function in _FUNCTIONS:
        bind(model, f"make_{function}", _maker(model, function, prepare))


def unbind_makers(model: keras.Model) -> None:
    """Give the functions and layers back to plain Keras."""
    unbind(model, *(f"make_{function}" for function in _FUNCTIONS))
    leave_kernels(model)
    for layer in batch_norms(model):
        ungroup_statistics(layer)


def rebuild_functions(model: keras.Model) -> None:
    """Forget compiled steps, so that the next call traces them for the present devices."""
    for function in _FUNCTIONS:
        setattr(model, function, None)


def _maker(model: keras.Model, function: str, prepare: Callable[[], None]) -> Callable[..., Any]:
    def make(force: bool = False) -> Any:
        if getattr(model, function) is None or force:
            prepare()
        return original(model, f"make_{function}")(force=force)

    return make
