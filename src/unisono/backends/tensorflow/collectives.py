"""Raw collectives over processes on TensorFlow; all of them work in a tf.function too.

TensorFlow has no reduce-scatter on a CPU: there, and on a GPU for the same result, a share of the
full reduction is kept.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from unisono.backends.tensorflow.process_group import Group
from unisono.errors import StrategyError

_as_written = tf.autograph.experimental.do_not_convert
_OPS = {"sum": "Add", "min": "Min", "max": "Max", "product": "Mul"}


class TensorFlowCollectives:
    """See base.Collectives."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank = group.rank
        self.size = group.size

    @_as_written
    def all_reduce(self, tensors: Sequence[Any], op: str) -> list[Any]:
        return self._group.all_reduce(tensors, _named(op))

    @_as_written
    def all_gather(self, tensor: Any) -> list[Any]:
        tensor = tf.convert_to_tensor(tensor)
        if not tensor.shape.rank:
            return list(tf.unstack(self._group.all_gather(tensor)))
        sizes = self._group.row_counts(tensor)
        rows = self._group.gather_rows(tensor, sizes)
        return list(tf.split(rows, sizes, num=self.size))

    @_as_written
    def broadcast(self, tensors: Sequence[Any], root: int) -> list[Any]:
        return self._group.broadcast(tensors, root)

    @_as_written
    def reduce_scatter(self, tensor: Any, op: str) -> Any:
        (reduced,) = self.all_reduce([tensor], op)
        fewest, rest = tf.shape(reduced)[0] // self.size, tf.shape(reduced)[0] % self.size
        start = self.rank * fewest + tf.minimum(self.rank, rest)
        return reduced[start : start + fewest + tf.cast(self.rank < rest, tf.int32)]

    @_as_written
    def all_to_all(self, tensor: Any, splits: Sequence[int]) -> tuple[Any, list[int]]:
        tensor = tf.convert_to_tensor(tensor)
        every = self._group.all_gather(tf.convert_to_tensor(splits, tf.int32))
        shape = tf.concat([[self.size, tf.reduce_max(every)], tf.shape(tensor)[1:]], 0)
        chunks = tf.RaggedTensor.from_row_lengths(tensor, every[self.rank]).to_tensor(shape=shape)
        counts = every[:, self.rank]
        received = self._group.exchange(chunks)
        rows = tf.boolean_mask(received, tf.sequence_mask(counts, tf.shape(received)[1]))
        return rows, counts if tf.is_symbolic_tensor(counts) else counts.numpy().tolist()

    @_as_written
    def barrier(self) -> None:
        self._group.all_reduce([tf.zeros([])])


def _named(op: str) -> str:
    if op not in _OPS:
        raise StrategyError(f"Asked to reduce by {op!r}. Use one of {', '.join(_OPS)}.")
    return _OPS[op]
