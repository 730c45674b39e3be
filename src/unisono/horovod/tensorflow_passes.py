"""Gradients of several backward passes added up in variables of TensorFlow, as a graph needs it."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from unisono.horovod.frameworks import is_sparse
from unisono.horovod.gradients import ReductionSettings


class GraphPasses:
    """See gradients.Passes; the sums and the count live in variables."""

    def __init__(self, settings: ReductionSettings) -> None:
        self._settings = settings
        self._count: Any = None
        self._sums: list[Any] = []

    def run(
        self,
        grads: Sequence[Any],
        reduce_and_apply: Callable[[Sequence[Any]], None],
        skip: Callable[[], None],
    ) -> None:
        """Add a pass; at every last one, apply the sum."""
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
        if not is_sparse(grad):
            return grad
        if not self._settings.sparse_as_dense:
            raise ValueError(
                "A gradient is given as IndexedSlices, which backward_passes_per_step > 1 cannot "
                "add up. Give sparse_as_dense=True."
            )
        return tf.convert_to_tensor(grad)

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
