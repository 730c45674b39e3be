"""One replica in the middle of a step: its rows of the batch, and collectives with the others.

Replicas reach each other by `Links`: within a process by tf.distribute, or across processes by the
group of a run. Rows may be those of dense, ragged and sparse tensors.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import keras
import tensorflow as tf

from unisono.backends.tensorflow.collectives import Group
from unisono.data.shards import shard_bounds
from unisono.replication.batch_norm import merged_moments
from unisono.replication.step import StepState, not_reduced_error

COMPOSITES = (tf.RaggedTensor, tf.SparseTensor)

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
    """How a replica communicates with the others."""

    index: Any
    num_replicas: int

    def all_reduce(self, operands: Sequence[Any]) -> list[Any]:
        """Sums over replicas, of dense tensors and of IndexedSlices; no gradient flows."""

    def gather(self, x: Any, num_rows: Any, is_replicated: Any) -> Any:
        """The rows of all replicas in order; those of the first if `is_replicated`."""


class LinksInProcess:
    """The replicas of a strategy of tf.distribute; made in the context of one of them."""

    def __init__(self, num_replicas: int) -> None:
        self._context = tf.distribute.get_replica_context()
        self.index = self._context.replica_id_in_sync_group
        self.num_replicas = num_replicas

    def all_reduce(self, operands: Sequence[Any]) -> list[Any]:
        # Copied: outside of a graph, tf.distribute does not accept a variable's own value.
        copies = [t if isinstance(t, tf.IndexedSlices) else tf.identity(t) for t in operands]
        if self._context.strategy.is_merging:
            return list(self._context.merge_call(_reduce_merged, args=tuple(copies)))
        return list(self._context.all_reduce(tf.distribute.ReduceOp.SUM, copies))

    def gather(self, x: Any, num_rows: Any, is_replicated: Any) -> Any:
        if isinstance(x, COMPOSITES):
            return _gather_composite(x, lambda part: self.gather(part, num_rows, is_replicated))
        is_bool = x.dtype == tf.bool
        every = self._context.all_gather(tf.cast(x, tf.int32) if is_bool else x, axis=0)
        return tf.cast(every, x.dtype)


class LinksAcrossProcesses:
    """Replicas in processes of their own, each of which has read only its rows."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.index = group.rank
        self.num_replicas = group.size

    def all_reduce(self, operands: Sequence[Any]) -> list[Any]:
        is_sparse = [isinstance(operand, tf.IndexedSlices) for operand in operands]
        pairs = list(zip(operands, is_sparse, strict=True))
        sparse = iter(self._group.sum_slices([one for one, flag in pairs if flag]))
        # Collectives run in the order in which they are traced, and gradients of the last layers
        # are computed first.
        others = [one for one, flag in pairs if not flag][::-1]
        dense = iter(self._group.all_reduce(others, is_traced_alike=True)[::-1])
        return [next(sparse if flag else dense) for flag in is_sparse]

    def gather(self, x: Any, num_rows: Any, is_replicated: Any) -> Any:
        group, count = self._group, self.num_replicas
        if isinstance(x, COMPOSITES):
            return _gather_composite(x, lambda p: group.gather_rows(p, group.row_counts(p)))
        bounds = [shard_bounds(num_rows, count, i) for i in range(count)]
        sharded = tf.stack([stop - start for start, stop in bounds])
        replicated = tf.one_hot(0, count, num_rows, 0, dtype=tf.int32)
        return group.gather_rows(x, tf.where(is_replicated, replicated, sharded))


class TensorFlowReplica:
    """See step.Replica."""

    def __init__(self, num_rows: Any, links: Links, *, is_custom_loop: bool = False) -> None:
        self.state = StepState(adds_up=is_custom_loop)
        self.is_custom_loop = self.may_be_empty = is_custom_loop
        self._links = links
        self._graph = tf.compat.v1.get_default_graph()
        self._index = links.index
        self.num_rows = num_rows
        self._num_replicas = count = links.num_replicas
        start, stop = shard_bounds(num_rows, count, self._index)
        # A batch with fewer rows than replicas is replicated. Not in a custom training loop, which
        # sums what replicas return: there, some replicas have no rows.
        self._is_replicated = is_replicated = tf.logical_and(num_rows < count, not is_custom_loop)
        self._start = tf.where(is_replicated, 0, start)
        self._stop = tf.where(is_replicated, num_rows, stop)
        rows = tf.cast(self._stop - self._start, tf.float32)
        self.share = tf.where(is_replicated, 1.0 / count, rows / tf.cast(num_rows, tf.float32))
        self.metric_factor = tf.where(is_replicated, 1.0 / count, 1.0)
        self.sum_scale = tf.where(is_replicated, 1.0, 1.0 / self.share)
        self._rows_after = tf.where(is_replicated, self._stop, num_rows)
        self.bounds = self._start, self._stop
        self._postponed: Callable[[], Any] | None = None
        self._riders: list[Any] = []
        self._rider_sums: list[Any] | None = None

    def own_rows(self, data: Any) -> Any:
        def rows(leaf: Any) -> Any:
            return None if leaf is None else rows_between(leaf, self._start, self._stop)

        # Sliced on the host, so that only these rows are copied to the device.
        with tf.device("CPU:0"):
            return keras.tree.map_structure(rows, data)

    def gather_rows(self, x: Any) -> Any:
        every = self._links.gather(x, self.num_rows, self._is_replicated)
        every = tf.nest.map_structure(tf.stop_gradient, every, expand_composites=True)
        after = rows_between(every, self._stop, self._rows_after)
        return join_rows([rows_between(every, 0, self._start), x, after])

    def follow_changes(self, own: Any, gathered: Any) -> None:
        """Tensors of a graph cannot be changed."""

    def with_global_gradient(self, loss: Any) -> Any:
        scaled = loss * tf.cast(self.sum_scale, loss.dtype)
        return scaled + tf.stop_gradient(loss - scaled)

    def moments(self, x: Any, mask: Any, axes: list[int]) -> tuple[Any, Any]:
        return merged_moments(self, x, mask, axes)

    def stack(self, x: Any) -> Any:
        own = tf.one_hot(self._index, self._num_replicas, dtype=x.dtype)
        own = tf.reshape(own, [-1, *[1] * len(x.shape)])
        (every,) = self.all_reduce([own * x])
        # The entries of other replicas are constants here; the gradients of their losses with
        # respect to this replica's entry are all-reduced below.
        return self._with_summed_gradient(tf.stop_gradient(every * (1 - own)) + own * x)

    def _with_summed_gradient(self, every: Any) -> Any:
        # Around the all-reduce itself it would be far slower to trace: TensorFlow searches for
        # variables in all that a custom gradient's outputs depend on, up to its inputs.
        @tf.custom_gradient
        def identity(every: Any) -> Any:
            return tf.identity(every), self.all_reduce_gradient

        return identity(every)

    def all_reduce_gradient(self, own: Any) -> Any:
        """The gradient of all replicas' losses with respect to a value that they have in common."""
        if self.state.is_weighted:
            return self.all_reduce([own])[0]
        share = tf.cast(self.share, own.dtype)
        return self.all_reduce([own * share])[0] / share

    def postpone(self, act: Callable[[], Any]) -> None:
        """Call `act` at the next all-reduce, and make one collective of both."""
        self._postponed = act

    def all_reduce(self, tensors: Sequence[Any]) -> list[Any]:
        act, self._postponed = self._postponed, None
        if act is None:
            return self._sum(tensors)
        self._riders, self._rider_sums = list(tensors), None
        act()  # Its first all-reduce includes the riders.
        if self._rider_sums is not None:
            return self._rider_sums
        left, self._riders = self._riders, []
        return self._sum(left)

    def _sum(self, tensors: Sequence[Any]) -> list[Any]:
        if not tensors or self._num_replicas == 1:
            return list(tensors)
        riders, self._riders = self._riders, []
        sums = self._links.all_reduce([*tensors, *riders])
        if riders:
            self._rider_sums = sums[len(tensors) :]
        return sums[: len(tensors)]

    def reduce_gradients(
        self, gradients: Sequence[Any], variables: Sequence[Any], weight: Any
    ) -> list[Any]:
        known = [self._weighted(g, weight) for g in gradients if g is not None]
        sums = iter(self.all_reduce(known))
        return [None if g is None else next(sums) for g in gradients]

    def check_reduced(self, optimizer: Any, gradients: Sequence[Any]) -> None:
        if tf.compat.v1.get_default_graph() is not self._graph:
            return  # In a branch of the graph, where replicas cannot communicate.
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
        # Kept sparse: Keras' optimizers update only the rows that were used, and square the slices
        # one by one. So where the batch is replicated, all slices come from the first replica.
        weight *= tf.where(self._is_replicated, tf.cast(self._num_replicas, weight.dtype), 1)
        is_left_out = tf.logical_and(self._is_replicated, self._index > 0)
        count = tf.where(is_left_out, 0, tf.shape(gradient.indices)[0])
        values, indices = gradient.values[:count] * weight, gradient.indices[:count]
        return tf.IndexedSlices(values, indices, gradient.dense_shape)


def after_data(data: Any) -> AbstractContextManager[Any]:
    """Ops inside wait for the batch.

    Without it, ops that need no data (counting an iteration) run before the iterator of a graph
    reports that it has ended, and the end of an epoch counts as a step.
    """
    leaves = tf.nest.flatten(data, expand_composites=True)
    tensors = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]
    dependencies: AbstractContextManager[Any] = tf.control_dependencies(tensors)
    return dependencies


# -- rows -----------------------------------------------------------------------------------------


def num_rows(data: Any) -> Any:
    """The number of rows of a global batch."""
    leaf = next(leaf for leaf in keras.tree.flatten(data) if leaf is not None)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return leaf.nrows(tf.int32) if isinstance(leaf, tf.RaggedTensor) else tf.shape(leaf)[0]


def rows_between(leaf: Any, start: Any, stop: Any) -> Any:
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[start:stop]
    rest = tf.cast(leaf.dense_shape[1:], tf.int32)
    begin = tf.concat([[start], tf.zeros_like(rest)], 0)
    size = tf.concat([[stop - start], rest], 0)
    return tf.sparse.slice(leaf, tf.cast(begin, tf.int64), tf.cast(size, tf.int64))


def join_rows(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts))
    return tf.concat(parts, 0)


def spec_of_any_rows(leaf: Any) -> Any:
    """The specification of a leaf of a batch, for any number of rows."""
    if leaf is None or not leaf.shape.rank:
        return leaf
    shape = [None, *leaf.shape[1:]]
    if isinstance(leaf, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
    kind = tf.SparseTensorSpec if isinstance(leaf, tf.SparseTensor) else tf.TensorSpec
    return kind(shape, leaf.dtype)


def _gather_composite(x: Any, gather: Callable[[Any], Any]) -> Any:
    """A ragged or sparse tensor of all replicas' rows; `gather` joins the rows of a dense one."""
    if isinstance(x, tf.RaggedTensor):
        lengths = [gather(lengths) for lengths in x.nested_row_lengths()]
        return tf.RaggedTensor.from_nested_row_lengths(gather(x.flat_values), lengths)
    rows = gather(x.dense_shape[:1])
    offsets = tf.repeat(tf.cumsum(rows, exclusive=True), gather(tf.shape(x.values)[:1]))
    indices = gather(x.indices)
    indices = tf.concat([indices[:, :1] + offsets[:, None], indices[:, 1:]], 1)
    shape = tf.concat([[tf.reduce_sum(rows)], x.dense_shape[1:]], 0)
    return tf.SparseTensor(indices, gather(x.values), shape)


def _reduce_merged(strategy: tf.distribute.Strategy, *values: Any) -> Any:
    """Sums over replicas, in cross-replica context; no gradient flows."""
    pairs = [(value, value) for value in values]
    return strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)
