"""A process' share of arrays on TensorFlow, read ahead of the steps in a tf.data pipeline.

Built as Keras builds its own for arrays, which is fast: an epoch's order of rows at once, cut into
batches, then a gather of this process' rows in parallel. The data set yields `Share`s of tensors.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from unisono.engines.world_feed import Share

_num_shuffles = 0


def share_dataset(shared: Any) -> tf.data.Dataset:
    """The shares of one `SharedArrays`, an epoch each time that it is iterated."""
    inputs = array_slicing.convert_to_sliceable(shared.arrays._inputs, target_backend="tensorflow")
    inputs = keras.tree.lists_to_tuples(inputs)

    def gather(share: Share, data: Any) -> Share:
        rows = keras.tree.traverse(lambda part: _rows_of(part, share.data), data)
        return Share(rows, *share[1:])

    shares = _order(shared).prefetch(1).flat_map(lambda rows: _cut(rows, shared))
    dataset = tf.data.Dataset.zip((shares, tf.data.Dataset.from_tensors(inputs).repeat()))
    dataset = dataset.map(gather, num_parallel_calls=tf.data.AUTOTUNE)
    options = tf.data.Options()
    # As Keras does: they cost more than they bring.
    options.experimental_optimization.apply_default_optimizations = False
    # The thread that tunes a pipeline wakes up at growing intervals, and the end of an epoch may
    # have to wait for it: as long as the epoch took, up to a minute.
    options.autotune.enabled = False
    if shared.arrays._shuffle:
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    return dataset.with_options(options).prefetch(tf.data.AUTOTUNE)


def _order(shared: Any) -> tf.data.Dataset:
    """All row numbers of an epoch, as one element, in the order that Keras takes them."""
    count, how = shared.arrays._num_samples, shared.arrays._shuffle
    is_seeded_by_user = tf.compat.v1.get_seed(0)[0] != shared.feed.world.seed
    if how and not is_seeded_by_user:
        return _new_order_each_epoch(shared)
    if how == "batch":
        return shared.order.get_tf_dataset().rebatch(count)
    # In one batch the order is the same, and Keras' pipeline is run once in an epoch.
    return ArrayDataAdapter(np.arange(count), batch_size=count, shuffle=how).get_tf_dataset()


def _new_order_each_epoch(shared: Any) -> tf.data.Dataset:
    """For a program without a seed, the same order in all processes.

    With a seed, Keras takes one order in all epochs.
    """
    global _num_shuffles
    _num_shuffles += 1
    seed = tf.constant([shared.feed.world.seed, _num_shuffles], tf.int64)
    count, global_batch = shared.arrays._num_samples, shared.arrays._batch_size
    is_by_batch = shared.arrays._shuffle == "batch"

    def order(number: Any) -> Any:
        keys = tf.random.stateless_uniform([count], seed + number, dtype=tf.float64)
        # By whole numbers first, so that rows stay in their batch.
        keys += tf.cast(tf.range(count) // global_batch if is_by_batch else 0, tf.float64)
        return tf.cast(tf.argsort(keys), tf.int64)

    numbers = tf.data.Dataset.random(seed=_num_shuffles, rerandomize_each_iteration=True)
    return numbers.take(1).map(order)


def _cut(rows: Any, shared: Any) -> tf.data.Dataset:
    """The global batches of an epoch, each as the row numbers of this process."""
    global_batch = shared.arrays._batch_size
    num_even = shared.arrays._num_samples // global_batch * global_batch
    batches = tf.reshape(rows[:num_even], [-1, global_batch])
    dataset = tf.data.Dataset.from_tensor_slices(_shares(batches, shared))
    if num_even == shared.arrays._num_samples:
        return dataset
    rest = tf.reshape(rows[num_even:], [1, shared.arrays._num_samples - num_even])
    return dataset.concatenate(tf.data.Dataset.from_tensor_slices(_shares(rest, shared)))


def _shares(batches: Any, shared: Any) -> Share:
    """This process' part of each of several batches, which have the same number of rows."""
    num_rows = int(batches.shape[1])
    start, stop, is_whole = shared.feed.bounds(num_rows)
    count = tf.shape(batches)[:1]
    return Share(
        batches[:, start:stop],
        tf.fill(count, num_rows),
        tf.fill(count, is_whole),
        (_checksums(batches, num_rows) + shared.values) % 2**52,
    )


def _checksums(batches: Any, num_rows: int) -> Any:
    """A number for each batch that depends on its rows and on their order."""
    weights = tf.range(1, num_rows + 1, dtype=tf.int64) * 2_654_435_761 % 4_294_967_291
    return tf.reduce_sum((batches + 1) * weights, axis=1) % 2**52


def _rows_of(part: Any, indices: Any) -> Any:
    if isinstance(part, array_slicing.TensorflowSparseWrapper):
        return array_slicing.slice_tensorflow_sparse_wrapper(part, indices)
    if isinstance(part, (list, tuple, dict)):
        return None  # Go on into it.
    return tf.gather(part, indices, axis=0) if tf.is_tensor(part) else part
