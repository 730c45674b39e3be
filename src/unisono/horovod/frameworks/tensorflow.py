"""Collectives in TensorFlow graphs, sparse gradients, and sums of gradients kept in variables."""

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from unisono.errors import DisagreementError
from unisono.horovod.frameworks import HorovodFramework, RunTensors, Shapes

if TYPE_CHECKING:
    from unisono.horovod.optimizer import GradientReduction, ReductionSettings


class _TensorFlow(HorovodFramework):
    has_gloo = False  # Tensors are transferred by gRPC.

    def run(
        self,
        what: str,
        tensors: Sequence[Any],
        forward: RunTensors,
        backward: RunTensors | None,
        shapes: Shapes,
    ) -> list[Any]:
        def run(*given: Any) -> list[Any]:
            if tf.executing_eagerly():
                return forward(list(given))
            expected = shapes()
            results = tf.py_function(
                lambda *eager: forward(list(eager)), given, [dtype for dtype, _ in expected]
            )
            for result, (_, shape) in zip(results, expected, strict=True):
                result.set_shape(shape)
            return list(results)

        if backward is None:
            return run(*tensors)

        @tf.custom_gradient
        def run_recorded(*given: Any) -> Any:
            return run(*given), lambda *upstream: backward(list(upstream))

        return list(run_recorded(*tensors))

    def disagreement(self, message: str, *, is_bad_argument: bool) -> DisagreementError:
        """As in Horovod also a FailedPreconditionError, or an InvalidArgumentError."""
        return (_BadArgument if is_bad_argument else _Mismatch)(message)

    def is_sparse(self, value: Any) -> bool:
        return isinstance(value, tf.IndexedSlices)

    def to_dense(self, value: Any) -> Any:
        return tf.convert_to_tensor(value) if self.is_sparse(value) else value

    def with_rows(self, sparse: Any, values: Any, indices: Any) -> Any:
        return tf.IndexedSlices(values, indices, dense_shape=sparse.dense_shape)

    def make_passes(self, settings: "ReductionSettings") -> Any:
        return _GraphPasses(settings)

    def bind_model(self, model: Any, reduction: "GradientReduction") -> None:
        # XLA cannot call back into Python, where the processes agree on a collective.
        if model.jit_compile:
            model.jit_compile = False
            warnings.warn(
                "XLA is switched off for a model with hvd.DistributedOptimizer on TensorFlow. "
                "Compile with jit_compile=False to avoid this warning.",
                stacklevel=4,
            )

    def is_cuda_built(self) -> bool:
        return bool(tf.test.is_built_with_cuda())

    def is_rocm_built(self) -> bool:
        return bool(tf.test.is_built_with_rocm())


def _also(base: Any, *more: type) -> type[DisagreementError]:
    def init(self: Any, message: str) -> None:
        base.__init__(self, None, None, message)

    return type("DisagreementError", (DisagreementError, base, *more), {"__init__": init})


_Mismatch = _also(tf.errors.FailedPreconditionError)
# A graph makes an InvalidArgumentError of a Python function's ValueError, and of others
# UnknownError.
_BadArgument = _also(tf.errors.InvalidArgumentError, ValueError)


class _GraphPasses:
    """As frameworks.Passes; the sums and the count live in variables, as a graph needs it."""

    def __init__(self, settings: "ReductionSettings") -> None:
        self._settings = settings
        self._count: Any = None
        self._sums: list[Any] = []

    def run(
        self,
        grads: Sequence[Any],
        reduce_and_apply: Callable[[Sequence[Any]], None],
        skip: Callable[[], None],
    ) -> None:
        dense = [self._dense(grad) for grad in grads]
        self._make_variables(dense)
        for total, grad in zip(self._sums, dense, strict=True):
            if grad is not None:
                total.assign_add(grad)
        self._count.assign_add(1)

        def last() -> Any:
            reduce_and_apply([self._result(total) for total in self._sums])
            for total in self._sums:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            self._count.assign(0)
            return tf.constant(0)

        def other() -> Any:
            skip()
            return tf.constant(0)

        tf.cond(tf.equal(self._count, self._settings.num_passes), last, other)

    def _dense(self, grad: Any) -> Any:
        if isinstance(grad, tf.IndexedSlices) and not self._settings.sparse_as_dense:
            raise ValueError(
                "backward_passes_per_step > 1 cannot sum gradients that are IndexedSlices. Give "
                "sparse_as_dense=True."
            )
        return FRAMEWORK.to_dense(grad)

    def _result(self, total: Any) -> Any:
        if total is None:
            return None
        value = tf.convert_to_tensor(total)
        return value / self._settings.num_passes if self._settings.average_passes else value

    def _make_variables(self, grads: Sequence[Any]) -> None:
        if self._count is not None:
            return
        with tf.init_scope():
            self._count = tf.Variable(0, trainable=False)
            self._sums = [
                None
                if grad is None
                else tf.Variable(tf.zeros(grad.shape, grad.dtype), trainable=False)
                for grad in grads
            ]


FRAMEWORK = _TensorFlow()
