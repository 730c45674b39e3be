"""What differs between JAX, TensorFlow and torch in Horovod's interface, behind one class.

Collectives run eagerly, after the processes have agreed on the request. A TensorFlow graph calls
back into Python for them; JAX has no such callback that may itself use JAX, so there they are
eager only. The rest of `unisono.horovod` never asks which backend is in use.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from unisono.errors import DisagreementError

if TYPE_CHECKING:
    from unisono.horovod.optimizer import GradientReduction, ReductionSettings

RunTensors = Callable[[list[Any]], list[Any]]
Shapes = Callable[[], list[tuple[str, tuple[int | None, ...] | None]]]
"""Data types and shapes of a collective's results, as far as a graph knows them."""


class Passes:
    """Sums the gradients of several backward passes before they are reduced."""

    def __init__(self, settings: "ReductionSettings") -> None:
        self._num_passes = settings.num_passes
        self._is_averaged = settings.average_passes
        self._count = 0
        self._sums: list[Any] = []

    def run(
        self,
        grads: Sequence[Any],
        reduce_and_apply: Callable[[Sequence[Any]], None],
        skip: Callable[[], None],
    ) -> None:
        """Add the gradients of a pass; apply their sum after the last pass of a step."""
        total = self.add(grads)
        if total is None:
            skip()
        else:
            reduce_and_apply(total)

    def add(self, grads: Sequence[Any]) -> list[Any] | None:
        """The sum after the last pass of a step, else None."""
        if self._count == 0:
            self._sums = [None if grad is None else keras.ops.copy(grad) for grad in grads]
        else:
            self._sums = [
                other if one is None else one if other is None else one + other
                for one, other in zip(self._sums, grads, strict=True)
            ]
        self._count += 1
        if self._count < self._num_passes:
            return None
        sums, self._sums, self._count = self._sums, [], 0
        return [self._averaged(total) for total in sums]

    def _averaged(self, total: Any) -> Any:
        return total / self._num_passes if self._is_averaged and total is not None else total


class HorovodFramework:
    """What Horovod's interface needs of a backend, beside its collectives; these are defaults."""

    has_gloo = True
    """Whether gloo transfers tensors between CPUs."""

    def run(
        self,
        what: str,
        tensors: Sequence[Any],
        forward: RunTensors,
        backward: RunTensors | None,
        shapes: Shapes,
    ) -> list[Any]:
        """`forward(tensors)`, eagerly or in a graph, with the gradients that `backward` gives."""
        raise NotImplementedError

    def check_not_traced(self, what: str, tensors: Sequence[Any]) -> None:
        """Raise StrategyError where a collective would run at trace time only."""

    def disagreement(self, message: str, *, is_bad_argument: bool) -> DisagreementError:
        """The error for requests that differ; a RuntimeError, as in Horovod."""
        return DisagreementError(message)

    def pack(self, tensors: Sequence[Any]) -> tuple[Sequence[Any], Callable[[list[Any]], Any]]:
        """Tensors to reduce in fewer collectives, and a function that unpacks the results."""
        return tensors, lambda results: results

    def scale_integers(self, tensor: Any, factor: float, dtype: str) -> Any:
        """Integers times a float64, truncated."""
        return keras.ops.cast(keras.ops.multiply(keras.ops.cast(tensor, "float64"), factor), dtype)

    def wait(self, results: Sequence[Any]) -> None:
        """Block until results are computed."""

    def is_sparse(self, value: Any) -> bool:
        """Whether a gradient consists of some rows of a tensor (TensorFlow's IndexedSlices)."""
        return False

    def to_dense(self, value: Any) -> Any:
        return value

    def with_rows(self, sparse: Any, values: Any, indices: Any) -> Any:
        """A sparse gradient of the same shape with other rows."""
        raise NotImplementedError

    def make_passes(self, settings: "ReductionSettings") -> Any:
        return Passes(settings)

    def bind_optimizer(self, optimizer: Any, reduction: "GradientReduction") -> None:
        """Bind what a distributed optimizer needs beside `apply`."""

    def bind_model(self, model: Any, reduction: "GradientReduction") -> None:
        """Change how a model with a distributed optimizer trains."""

    def is_cuda_built(self) -> bool:
        raise NotImplementedError

    def is_rocm_built(self) -> bool:
        raise NotImplementedError

    def nccl_version(self) -> int:
        """As one number; 1 if CUDA is there and the version is not known."""
        return int(self.is_cuda_built())


@functools.cache
def framework() -> HorovodFramework:
    """The implementation for Keras' backend."""
    module = importlib.import_module(f"{__name__}.{keras.backend.backend()}")
    found: HorovodFramework = module.FRAMEWORK
    return found
