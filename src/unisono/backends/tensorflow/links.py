"""How replicas reach each other: within a process by tf.distribute, or across processes."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from unisono.backends.tensorflow.process_group import Group
from unisono.backends.tensorflow.rows import Composite, gather_parts
from unisono.data.shards import shard_bounds


class LinksInProcess:
    """The replicas of a strategy of tf.distribute; made in the context of one of them."""

    def __init__(self, num_replicas: int) -> None:
        self._context = tf.distribute.get_replica_context()
        self.index = self._context.replica_id_in_sync_group
        self.num_replicas = num_replicas

    def all_reduce(self, operands: Sequence[Any]) -> list[Any]:
        # Copied: tf.distribute takes a variable's own value, outside of a graph, for no value.
        copies = [t if isinstance(t, tf.IndexedSlices) else tf.identity(t) for t in operands]
        if self._context.strategy.is_merging:
            return list(self._context.merge_call(_add_up, args=tuple(copies)))
        return list(self._context.all_reduce(tf.distribute.ReduceOp.SUM, copies))

    def gather(self, x: Any, num_rows: Any, is_replicated: Any) -> Any:
        if isinstance(x, Composite):
            return gather_parts(x, lambda part: self.gather(part, num_rows, is_replicated))
        is_bool = x.dtype == tf.bool
        every = self._context.all_gather(tf.cast(x, tf.int32) if is_bool else x, axis=0)
        return tf.cast(every, x.dtype)


class LinksAcrossProcesses:
    """Replicas in processes of their own, each of which holds its rows already."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.index = group.rank
        self.num_replicas = group.size

    def all_reduce(self, operands: Sequence[Any]) -> list[Any]:
        is_sparse = [isinstance(operand, tf.IndexedSlices) for operand in operands]
        pairs = list(zip(operands, is_sparse, strict=True))
        sparse = iter(self._group.sum_slices([one for one, flag in pairs if flag]))
        others = [one for one, flag in pairs if not flag]
        dense = iter(self._group.all_reduce(others, is_traced_alike=True))
        return [next(sparse if flag else dense) for flag in is_sparse]

    def gather(self, x: Any, num_rows: Any, is_replicated: Any) -> Any:
        if isinstance(x, Composite):
            group = self._group
            return gather_parts(x, lambda part: group.gather_rows(part, group.row_counts(part)))
        return self._group.gather_rows(x, self._sizes(num_rows, is_replicated))

    def _sizes(self, num_rows: Any, is_replicated: Any) -> Any:
        bounds = [shard_bounds(num_rows, self.num_replicas, i) for i in range(self.num_replicas)]
        shares = tf.stack([stop - start for start, stop in bounds])
        whole = tf.one_hot(0, self.num_replicas, num_rows, 0, dtype=tf.int32)
        return tf.where(is_replicated, whole, shares)


def _add_up(strategy: tf.distribute.Strategy, *values: Any) -> Any:
    """Sums over replicas, in cross-replica context; no gradient is taken of them."""
    pairs = [(value, value) for value in values]
    return strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)
