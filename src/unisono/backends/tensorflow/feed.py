"""Arrays on TensorFlow: a process' share of them, and all of them without tf.data's tuning.

A share is read ahead of the steps by threads, and not by tf.data: to build a pipeline takes as long
as several steps of a small net, at every call. Rows come in the order of Keras' own pipeline
wherever a program can know it, which is where it has set a seed.
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

from unisono.backends.tensorflow.rows import spec_of_any_rows
from unisono.data.arrays import changing_arrays
from unisono.data.feed import Shard
from unisono.devices.cpu import num_cores
from unisono.hooks import bind, original, unbind

_NUM_AHEAD = 2
_CALLS = ("fit", "evaluate", "predict")

_num_shuffles = 0


def leave_untuned(model: Any) -> None:
    """Have arrays that a model is given read by pipelines that no thread tunes.

    That thread wakes up at growing intervals, and the end of an epoch may have to wait for it: as
    long as the epoch took, up to a minute.
    """

    def change(adapter: Any) -> Any:
        plain = original(adapter, "get_tf_dataset")
        bind(adapter, "get_tf_dataset", lambda: _untuned(plain()))
        return adapter

    def within(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with changing_arrays(change):
                return original(model, name)(*args, **kwargs)

        return call

    for name in _CALLS:
        bind(model, name, within(name))


def leave_tuned(model: Any) -> None:
    """Give the calls back to plain Keras."""
    unbind(model, *_CALLS)


class Shares:
    """The shares of one `SharedArrays`, an epoch each time that it is iterated."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared
        inputs = array_slicing.convert_to_sliceable(shared.arrays._inputs)
        self._inputs = keras.tree.lists_to_tuples(inputs)
        self._next_order = _orders(shared)

    @property
    def element_spec(self) -> Shard:
        """What the shares look like, as a data set of them would say."""
        share = self._share(np.arange(min(1, self._shared.arrays._num_samples)))
        return Shard(keras.tree.map_structure(spec_of_any_rows, share.data), *share[1:])

    def __iter__(self) -> Iterator[Shard]:
        arrays = self._shared.arrays
        order = self._next_order()
        num_threads = min(_NUM_AHEAD, num_cores())
        with ThreadPoolExecutor(num_threads, "unisono-feed") as threads:
            ready: deque[Future[Shard]] = deque()
            for start in range(0, arrays._num_samples, arrays._batch_size):
                rows = order[start : start + arrays._batch_size]
                ready.append(threads.submit(self._share, rows))
                if len(ready) > _NUM_AHEAD:
                    yield ready.popleft().result()
            while ready:
                yield ready.popleft().result()

    def _share(self, rows: Any) -> Shard:
        share: Shard = self._shared.share(self._inputs, rows, _to_tensor)
        return share


def _untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _to_tensor(sliceable: Any, rows: Any) -> Any:
    found = sliceable.convert_to_tf_dataset_compatible(sliceable[rows])
    if isinstance(found, array_slicing.TensorflowSparseWrapper):
        return found.sparse
    is_ready = isinstance(found, (tf.Tensor, tf.RaggedTensor))
    return found if is_ready else tf.convert_to_tensor(found)


def _orders(shared: Any) -> Callable[[], Any]:
    """A function that gives the row numbers of an epoch, each time those of the next one."""
    count, how = shared.arrays._num_samples, shared.arrays._shuffle
    if not how:
        return lambda: np.arange(count)
    is_seeded_by_user = tf.compat.v1.get_seed(0)[0] != shared.feed.world.seed
    if not is_seeded_by_user:
        return _new_orders(shared)
    if how == "batch":
        dataset = shared.order.get_tf_dataset().rebatch(count)
    else:
        # In one batch the order is the same, and Keras' pipeline is run once in an epoch.
        rows = ArrayDataAdapter(np.arange(count), batch_size=count, shuffle=how)
        dataset = rows.get_tf_dataset()
    dataset = _untuned(dataset)
    return lambda: next(iter(dataset)).numpy()


def _new_orders(shared: Any) -> Callable[[], Any]:
    """For a program without a seed: the same order in all processes, another in each epoch.

    With a seed, Keras takes one order in all epochs.
    """
    global _num_shuffles
    _num_shuffles += 1
    draw = np.random.default_rng([shared.feed.world.seed, _num_shuffles])
    count, global_batch = shared.arrays._num_samples, shared.arrays._batch_size
    if shared.arrays._shuffle == "batch":
        # By whole numbers first, so that rows stay in their batch.
        return lambda: np.argsort(draw.random(count) + np.arange(count) // global_batch)
    return lambda: draw.permutation(count)
