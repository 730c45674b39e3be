"""Rows of tensors, dense, ragged and sparse alike: to take some, to join, to gather."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Composite = (tf.RaggedTensor, tf.SparseTensor)


def num_rows_of(leaf: Any) -> Any:
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


def gather_parts(x: Any, gather: Callable[[Any], Any]) -> Any:
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


def spec_of_any_rows(leaf: Any) -> Any:
    """What a leaf of a batch looks like, but for its number of rows."""
    if leaf is None or not leaf.shape.rank:
        return leaf
    shape = [None, *leaf.shape[1:]]
    if isinstance(leaf, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
    kind = tf.SparseTensorSpec if isinstance(leaf, tf.SparseTensor) else tf.TensorSpec
    return kind(shape, leaf.dtype)
