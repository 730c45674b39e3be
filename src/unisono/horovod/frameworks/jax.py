"""A training step on JAX in two compiled functions, with an eager reduction between them.

Collectives between processes are eager, while Keras compiles a step as a whole. So the step is
compiled up to where it passes the gradients to the optimizer, and from there on. Small arrays are
packed into few large ones for the reduction, which is fast only if it is compiled.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import distributions
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono.errors import ModelError, StrategyError
from unisono.hooks import bind, original
from unisono.horovod.frameworks import HorovodFramework, RunTensors, Shapes
from unisono.keras_internals import jax_function, optimized_variables

if TYPE_CHECKING:
    from unisono.horovod.optimizer import GradientReduction

_Spec = tuple[tuple[tuple[int, ...], str], ...]


class _Jax(HorovodFramework):
    def run(
        self,
        what: str,
        tensors: Sequence[Any],
        forward: RunTensors,
        backward: RunTensors | None,
        shapes: Shapes,
    ) -> list[Any]:
        self.check_not_traced(what, tensors)
        return forward(list(tensors))

    def check_not_traced(self, what: str, tensors: Sequence[Any]) -> None:
        if any(isinstance(tensor, jax.core.Tracer) for tensor in tensors):
            raise StrategyError(
                f"{what} was called while JAX traces a function (jax.jit, jax.grad). On JAX the "
                "collectives are eager: call it outside, on the function's results. In fit, "
                "hvd.DistributedOptimizer reduces the gradients."
            )

    def pack(self, tensors: Sequence[Any]) -> tuple[Sequence[Any], Callable[[list[Any]], Any]]:
        if len(tensors) < 2:
            return tensors, lambda results: results
        spec = tuple((tuple(array.shape), str(array.dtype)) for array in tensors)
        return _pack(list(tensors)), lambda results: _unpack(list(results), spec)

    def scale_integers(self, tensor: Any, factor: float, dtype: str) -> Any:
        # JAX has float64 only if the whole process enables it.
        numbers = np.asarray(tensor).astype("float64")
        return jnp.asarray((numbers * factor).astype(dtype))

    def wait(self, results: Sequence[Any]) -> None:
        jax.block_until_ready(list(results))

    def bind_optimizer(self, optimizer: Any, reduction: "GradientReduction") -> None:
        bind(optimizer, "stateless_apply", _make_stateless_apply(optimizer, reduction))

    def bind_model(self, model: Any, reduction: "GradientReduction") -> None:
        def make_train_function(force: bool = False) -> None:
            if model.train_function is None or force:
                model.train_function = jax_function(model, _TrainStep(model, reduction))

        bind(model, "make_train_function", make_train_function)

    def is_cuda_built(self) -> bool:
        return any(name.startswith("jax-cuda") for name in _plugins())

    def is_rocm_built(self) -> bool:
        return any(name.startswith("jax-rocm") for name in _plugins())


class _TrainStep:
    """`step(state, batch)` as Keras calls it."""

    def __init__(self, model: Any, reduction: "GradientReduction") -> None:
        self._model = model
        self._reduction = reduction
        self._optimizer = model.optimizer
        self._find, self._apply = self._find_gradients, self._apply_gradients
        if not model.run_eagerly and model.jit_compile:
            self._find = jax.jit(self._find_gradients)
            self._apply = jax.jit(self._apply_gradients, donate_argnums=(0, 1))

    def __call__(self, state: Any, data: Any) -> tuple[Any, Any]:
        trainable, _, optimizer_variables, _ = state
        logs, non_trainable, metrics, grads = self._find(state, data)
        passes = self._reduction.passes
        total = grads if passes is None else passes.add(grads)
        if total is None:
            optimizer_variables = _count_pass(self._optimizer, optimizer_variables)
        else:
            reduced = self._reduction.reduce(total, self._model.trainable_variables)
            trainable, optimizer_variables = self._apply(trainable, optimizer_variables, reduced)
        return logs, (trainable, non_trainable, optimizer_variables, metrics)

    def _find_gradients(self, state: Any, data: Any) -> tuple[Any, Any, Any, Any]:
        captured: list[Any] = []
        self._reduction.captured = captured
        try:
            logs, (_, non_trainable, _, metrics) = self._model.train_step(state, data)
        finally:
            self._reduction.captured = None
        if len(captured) != 1:
            raise ModelError(
                f"The model's train_step called optimizer.stateless_apply {len(captured)} times. "
                "On JAX, hvd.DistributedOptimizer needs a train_step that calls it once."
            )
        return logs, non_trainable, metrics, list(captured[0])

    def _apply_gradients(self, trainable: Any, variables: Any, grads: Any) -> tuple[Any, Any]:
        plain = original(self._optimizer, "stateless_apply")
        with self._reduction.plain():
            new_trainable, new_variables = plain(variables, grads, trainable)
        return new_trainable, new_variables


def _make_stateless_apply(optimizer: Any, reduction: "GradientReduction") -> Callable[..., Any]:
    def stateless_apply(optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        plain = original(optimizer, "stateless_apply")
        if reduction.is_plain:
            return plain(optimizer_variables, grads, trainable_variables)
        if reduction.captured is not None:
            reduction.captured.append(grads)
            return trainable_variables, optimizer_variables
        FRAMEWORK.check_not_traced("hvd.DistributedOptimizer", grads)
        if reduction.passes is not None:
            grads = reduction.passes.add(grads)
            if grads is None:
                return trainable_variables, _count_pass(optimizer, optimizer_variables)
        reduced = reduction.reduce(grads, optimized_variables(optimizer))
        with reduction.plain():
            return plain(optimizer_variables, reduced, trainable_variables)

    return stateless_apply


def _count_pass(optimizer: Any, optimizer_variables: Any) -> list[Any]:
    """The variables of an optimizer after a pass that applied nothing."""
    mapping = list(zip(optimizer.variables, optimizer_variables, strict=True))
    with keras.StatelessScope(state_mapping=mapping) as scope:
        optimizer.iterations.assign_add(1)
    return [scope.get_current_value(variable) for variable in optimizer.variables]


@jax.jit
def _pack(arrays: list[Any]) -> list[Any]:
    """One vector for each data type, in the order in which the types appear."""
    dtypes = dict.fromkeys(array.dtype for array in arrays)
    return [
        jnp.concatenate([array.ravel() for array in arrays if array.dtype == dtype])
        for dtype in dtypes
    ]


@functools.partial(jax.jit, static_argnums=1)
def _unpack(vectors: list[Any], spec: _Spec) -> list[Any]:
    places = {dtype: number for number, dtype in enumerate(dict.fromkeys(d for _, d in spec))}
    taken = [0] * len(vectors)
    results = []
    for shape, dtype in spec:
        place, size = places[dtype], math.prod(shape)
        results.append(vectors[place][taken[place] : taken[place] + size].reshape(shape))
        taken[place] += size
    return results


def _plugins() -> Iterator[str]:
    for each in distributions():
        name = str(each.metadata["Name"] or "").lower().replace("_", "-")
        if name.endswith("pjrt"):
            yield name


FRAMEWORK = _Jax()
