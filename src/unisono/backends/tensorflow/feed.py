"""Arrays in a run of several processes: each process reads its shard of every global batch.

Threads prefetch shards, and not tf.data: building a pipeline takes as long as several steps of a
small net, at every call. Rows come in the order of Keras' own pipeline wherever a program can know
it, which is where it has set a seed.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from unisono.backends.tensorflow.replica import spec_of_any_rows
from unisono.data.feed import Shard
from unisono.devices.cpu import num_cores

_NUM_PREFETCHED = 2

_num_shuffles = 0


class ArrayShards:
    """The shards of one `ShardedArrays`, an epoch each time that it is iterated."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared
        inputs = array_slicing.convert_to_sliceable(shared.arrays._inputs)
        self._inputs = keras.tree.lists_to_tuples(inputs)
        self._next_order = _orders(shared)

    @property
    def element_spec(self) -> Shard:
        """The specification of the shards, as a data set of them would have it."""
        shard = self._shard(np.arange(min(1, self._shared.arrays._num_samples)))
        return Shard(keras.tree.map_structure(spec_of_any_rows, shard.data), *shard[1:])

    def __iter__(self) -> Iterator[Shard]:
        arrays = self._shared.arrays
        order = self._next_order()
        num_threads = min(_NUM_PREFETCHED, num_cores())
        with ThreadPoolExecutor(num_threads, "unisono-feed") as threads:
            ready: deque[Future[Shard]] = deque()
            for start in range(0, arrays._num_samples, arrays._batch_size):
                rows = order[start : start + arrays._batch_size]
                ready.append(threads.submit(self._shard, rows))
                if len(ready) > _NUM_PREFETCHED:
                    yield ready.popleft().result()
            while ready:
                yield ready.popleft().result()

    def _shard(self, rows: Any) -> Shard:
        shard: Shard = self._shared.shard(self._inputs, rows, _to_tensor)
        return shard


def _to_tensor(sliceable: Any, rows: Any) -> Any:
    found = sliceable.convert_to_tf_dataset_compatible(sliceable[rows])
    if isinstance(found, array_slicing.TensorflowSparseWrapper):
        return found.sparse
    is_ready = isinstance(found, (tf.Tensor, tf.RaggedTensor))
    return found if is_ready else tf.convert_to_tensor(found)


def _orders(shared: Any) -> Callable[[], Any]:
    """A function that returns the row numbers of the next epoch at each call."""
    count, how = shared.arrays._num_samples, shared.arrays._shuffle
    if not how:
        return lambda: np.arange(count)
    is_seeded_by_user = tf.compat.v1.get_seed(0)[0] != shared.feed.world.seed
    if not is_seeded_by_user:
        return _new_orders(shared)
    if how == "batch":
        dataset = shared.order.get_tf_dataset().rebatch(count)
    else:
        # As one batch, in the same order: Keras' pipeline then runs once in an epoch.
        rows = ArrayDataAdapter(np.arange(count), batch_size=count, shuffle=how)
        dataset = rows.get_tf_dataset()
    # Dropping an iterator may wait for tf.data's tuning thread, which wakes up ever more rarely.
    options = tf.data.Options()
    options.autotune.enabled = False
    dataset = dataset.with_options(options)
    return lambda: next(iter(dataset)).numpy()


def _new_orders(shared: Any) -> Callable[[], Any]:
    """For a program without a seed: the same order in all processes, another in each epoch.

    With a seed, Keras uses one order in all epochs.
    """
    global _num_shuffles
    _num_shuffles += 1
    draw = np.random.default_rng([shared.feed.world.seed, _num_shuffles])
    count, global_batch = shared.arrays._num_samples, shared.arrays._batch_size
    if shared.arrays._shuffle == "batch":
        # Sorted by batch number first, so that rows stay in their batch.
        return lambda: np.argsort(draw.random(count) + np.arange(count) // global_batch)
    return lambda: draw.permutation(count)
