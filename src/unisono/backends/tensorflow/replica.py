"""One replica in the middle of a step: its rows, and sums over all replicas.

Replicas are linked within a process, by tf.distribute, or across processes (tensorflow_links).
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import keras
import tensorflow as tf

from unisono.backends.tensorflow.rows import join_rows, num_rows_of, rows_between
from unisono.data.shards import shard_bounds
from unisono.replication.step import StepState, not_reduced_error

_running = threading.local()


def current_replica() -> "TensorFlowReplica | None":
    """The replica whose step this thread is tracing or running."""
    return getattr(_running, "replica", None)


@contextmanager
def running(replica: "TensorFlowReplica") -> Iterator["TensorFlowReplica"]:
    """Make a replica the current one of this thread."""
    _running.replica = replica
    try:
        yield replica
    finally:
        _running.replica = None


class Links(Protocol):
    """How a replica reaches the others."""

    index: Any
    num_replicas: int

    def all_reduce(self, operands: Sequence[Any]) -> list[Any]:
        """Sums over replicas, of dense tensors and of IndexedSlices; no gradient flows."""

    def gather(self, x: Any, num_rows: Any, is_replicated: Any) -> Any:
        """The rows of all replicas in order; of the first if `is_replicated`: each has all."""


class TensorFlowReplica:
    """See step.Replica."""

    def __init__(self, num_rows: Any, links: Links, *, is_own_loop: bool = False) -> None:
        self.state = StepState(adds_up=is_own_loop)
        self.is_own_loop = self.may_be_empty = is_own_loop
        self._links = links
        self._graph = tf.compat.v1.get_default_graph()
        self._index = links.index
        self.num_rows = num_rows
        self._num_replicas = num_replicas = links.num_replicas
        start, stop = shard_bounds(num_rows, num_replicas, self._index)
        # A batch smaller than the replicas runs whole on each, but in a user's own loop, which
        # adds up what replicas return: there some have no rows.
        self._is_whole = is_replicated = tf.logical_and(num_rows < num_replicas, not is_own_loop)
        self._start = tf.where(is_replicated, 0, start)
        self._stop = tf.where(is_replicated, num_rows, stop)
        rows = tf.cast(self._stop - self._start, tf.float32)
        fraction = rows / tf.cast(num_rows, tf.float32)
        self.share = tf.where(is_replicated, 1.0 / num_replicas, fraction)
        self.metric_factor = tf.where(is_replicated, 1.0 / num_replicas, 1.0)
        self.sum_scale = tf.where(is_replicated, 1.0, 1.0 / self.share)
        self._rows_after = tf.where(is_replicated, self._stop, num_rows)
        self._postponed: Callable[[], Any] | None = None
        self._riders: list[Any] = []
        self._rider_totals: list[Any] | None = None

    def own_rows(self, data: Any) -> Any:
        def rows(leaf: Any) -> Any:
            return None if leaf is None else rows_between(leaf, self._start, self._stop)

        # Sliced before it travels: a device gets its own rows only.
        with tf.device("CPU:0"):
            return keras.tree.map_structure(rows, data)

    def gather_rows(self, x: Any) -> Any:
        every = self._links.gather(x, self.num_rows, self._is_whole)
        every = tf.nest.map_structure(tf.stop_gradient, every, expand_composites=True)
        after = rows_between(every, self._stop, self._rows_after)
        return join_rows([rows_between(every, 0, self._start), x, after])

    def follow_changes(self, own: Any, gathered: Any) -> None:
        """Tensors of a graph cannot be changed."""

    def with_global_gradient(self, loss: Any) -> Any:
        scaled = loss * tf.cast(self.sum_scale, loss.dtype)
        return scaled + tf.stop_gradient(loss - scaled)

    def stack(self, x: Any) -> Any:
        own = tf.one_hot(self._index, self._num_replicas, dtype=x.dtype)
        own = tf.reshape(own, [-1, *[1] * len(x.shape)])
        (every,) = self.all_reduce([own * x])
        # The other replicas' parts are constants here; what their losses owe to this one's part
        # arrives when the gradient is summed.
        return self._with_summed_gradient(tf.stop_gradient(every * (1 - own)) + own * x)

    def _with_summed_gradient(self, every: Any) -> Any:
        # Around the sum itself it would be far slower to trace: TensorFlow looks for variables in
        # all that a custom gradient's outputs depend on, short of its inputs.
        @tf.custom_gradient
        def identity(every: Any) -> Any:
            return tf.identity(every), self.all_reduce_gradient

        return identity(every)

    def all_reduce_gradient(self, own: Any) -> Any:
        """What all replicas' losses owe to a value that they share."""
        if self.state.is_weighted:
            return self.all_reduce([own])[0]
        share = tf.cast(self.share, own.dtype)
        return self.all_reduce([own * share])[0] / share

    def postpone(self, act: Callable[[], Any]) -> None:
        """Do something when sums are next asked for, and add up all of it at once."""
        self._postponed = act

    def all_reduce(self, tensors: Sequence[Any]) -> list[Any]:
        act, self._postponed = self._postponed, None
        if act is None:
            return self._sum(tensors)
        self._riders, self._rider_totals = list(tensors), None
        act()  # Its first sums take the others along.
        if self._rider_totals is not None:
            return self._rider_totals
        left, self._riders = self._riders, []
        return self._sum(left)

    def _sum(self, tensors: Sequence[Any]) -> list[Any]:
        # Alone on a device other than the first, there is nobody to add up with.
        if not tensors or self._num_replicas == 1:
            return list(tensors)
        riders, self._riders = self._riders, []
        totals = self._links.all_reduce([*tensors, *riders])
        if riders:
            self._rider_totals = totals[len(tensors) :]
        return totals[: len(tensors)]

    def reduce_gradients(
        self, gradients: Sequence[Any], variables: Sequence[Any], weight: Any
    ) -> list[Any]:
        known = [self._weighted(g, weight) for g in gradients if g is not None]
        totals = iter(self.all_reduce(known))
        return [None if g is None else next(totals) for g in gradients]

    def check_reduced(self, optimizer: Any, gradients: Sequence[Any]) -> None:
        if tf.compat.v1.get_default_graph() is not self._graph:
            return  # In a branch of the graph, where replicas cannot reach each other.
        dense = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        sums = [tf.reduce_sum(tf.abs(tf.cast(g, tf.float32))) for g in dense if g is not None]
        if sums:
            own = tf.add_n(sums)
            (total,) = self.all_reduce([own])
            difference = tf.abs(total - self._num_replicas * own)
            is_other = difference > 1e-4 * tf.abs(total)  # False where they overflowed.
            tf.debugging.Assert(tf.logical_not(is_other), [not_reduced_error(optimizer)])

    def _weighted(self, gradient: Any, weight: Any) -> Any:
        weight = tf.cast(weight, gradient.dtype)
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient * weight
        # Kept sparse: Keras' optimizers update only the rows that were used. They square the
        # slices one by one: where the batch runs whole on each replica, all come from the first.
        weight *= tf.where(self._is_whole, tf.cast(self._num_replicas, weight.dtype), 1)
        is_left_out = tf.logical_and(self._is_whole, self._index > 0)
        count = tf.where(is_left_out, 0, tf.shape(gradient.indices)[0])
        values, indices = gradient.values[:count] * weight, gradient.indices[:count]
        return tf.IndexedSlices(values, indices, gradient.dense_shape)


def after_data(data: Any) -> AbstractContextManager[Any]:
    """What is done inside waits for the batch.

    Without it, ops that need no data (counting an iteration) run before the iterator of a graph
    reports that it has ended: the end of an epoch counts as a step.
    """
    leaves = tf.nest.flatten(data, expand_composites=True)
    tensors = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]
    dependencies: AbstractContextManager[Any] = tf.control_dependencies(tensors)
    return dependencies


def num_rows(data: Any) -> Any:
    """The rows of a global batch."""
    return num_rows_of(next(leaf for leaf in keras.tree.flatten(data) if leaf is not None))
