"""Arrays given to a model in a run of several processes: each process reads its own rows.

While such a call runs, the function by which Keras finds the adapter of some data is replaced. The
order of rows is that of Keras' own adapter, which iterates the indices of the rows, so that
batches and shuffles are exactly those of one device. Only this process' shard is then read.
"""

import functools
import itertools
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import numpy as np

from unisono.data.feed import Feed, Shard, checksum_of, short
from unisono.hooks import Patch
from unisono.keras_internals import (
    ArrayDataAdapter,
    DataAdapter,
    convert_to_sliceable,
    data_adapters,
    fields_of,
    partial_batches,
)

_thread = threading.local()


@contextmanager
def changing_arrays(change: Callable[[ArrayDataAdapter], Any]) -> Iterator[None]:
    """Have Keras read the arrays of calls of this thread inside by `change(adapter)`."""
    before = getattr(_thread, "change", None)
    _thread.change = change
    try:
        with _patch.applied():
            yield
    finally:
        _thread.change = before


def _changing(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def get_data_adapter(*args: Any, **kwargs: Any) -> Any:
        adapter = plain(*args, **kwargs)
        change = getattr(_thread, "change", None)
        if change is None or type(adapter) is not ArrayDataAdapter:
            return adapter
        return change(adapter)

    return get_data_adapter


_patch = Patch(lambda: data_adapters, "get_data_adapter", _changing)


class WrappedArrays(DataAdapter):
    """Keras' adapter of arrays, whose batches are read in another way."""

    def __init__(self, arrays: ArrayDataAdapter) -> None:
        self.arrays = arrays

    def on_epoch_begin(self) -> None:
        self.arrays.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self.arrays.on_epoch_end()

    @property
    def num_batches(self) -> Any:
        return self.arrays.num_batches

    @property
    def batch_size(self) -> Any:
        return self.arrays.batch_size

    @property
    def has_partial_batch(self) -> Any:
        return self.arrays.has_partial_batch

    @property
    def partial_batch_size(self) -> Any:
        return self.arrays.partial_batch_size


class ShardedArrays(WrappedArrays):
    """Keras' adapter of arrays, of which one process reads its shard."""

    def __init__(self, arrays: ArrayDataAdapter, feed: Feed) -> None:
        super().__init__(arrays)
        self.feed = feed
        self._fields = fields = fields_of(arrays)
        self.order = ArrayDataAdapter(
            np.arange(fields.num_samples), batch_size=fields.batch_size, shuffle=fields.shuffle
        )
        """The numbers of the rows, in the order that Keras takes them."""
        self.values = _checksum_of_some(fields.inputs)
        """A checksum of values that must be alike in all processes."""

    def get_jax_iterator(self, super_batch: int | None = None) -> Iterator[Any]:
        shards = self._jax_shards()
        if super_batch is None:
            return shards
        # Shards are no arrays that could be stacked for Keras to run several steps at once.
        several = iter(lambda: list(itertools.islice(shards, super_batch)), [])
        return map(partial_batches, several)

    def _jax_shards(self) -> Iterator[Shard]:
        def convert(sliceable: Any, rows: Any) -> Any:
            return sliceable.convert_to_jax_compatible(sliceable[rows])

        inputs = convert_to_sliceable(self._fields.inputs, target_backend="jax")
        for indices in self.order.get_jax_iterator():
            yield self.shard(inputs, np.asarray(indices), convert)

    def get_torch_dataloader(self) -> Any:
        assert self.feed.batches_of is not None
        return self.feed.batches_of(self)

    def get_tf_dataset(self) -> Any:
        assert self.feed.batches_of is not None
        return self.feed.batches_of(self)

    def shard(self, inputs: Any, indices: Any, convert: Callable[[Any, Any], Any]) -> Shard:
        """This process' rows of a global batch that has the rows of these numbers."""
        start, stop, is_replicated = self.feed.bounds(len(indices))
        own = indices[start:stop]
        # In order they are a slice, which reads without copying.
        is_slice = not self._fields.shuffle and len(own)
        rows = slice(int(own[0]), int(own[-1]) + 1) if is_slice else own
        data = keras.tree.map_structure(
            lambda sliceable: None if sliceable is None else convert(sliceable, rows), inputs
        )
        checksum = short(zlib.crc32(indices.tobytes(), self.values))
        return Shard(data, len(indices), is_replicated, checksum)


def _checksum_of_some(arrays: Any) -> int:
    """A checksum of evenly spread rows of some arrays, whatever their kinds."""
    total = 0
    for leaf in keras.tree.flatten(arrays):
        try:
            total = zlib.crc32(str(checksum_of(leaf)).encode(), total)
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError):
            continue  # Sparse or ragged: the number of rows is compared, and the dense arrays.
    return short(total)


def serving(feed: Feed) -> AbstractContextManager[None]:
    """Have arrays that Keras is given inside split between the processes."""
    return changing_arrays(lambda adapter: ShardedArrays(adapter, feed))


def without_shards(
    iterator: Any, plain: Callable[[Shard], Any] = lambda shard: shard.data
) -> Iterator[tuple[Any, Any, list[Any]]]:
    """Keras' epoch iterator with plain data in place of shards, to build a model by."""
    for begin, end, found in iterator:
        data = found[0] if isinstance(found, (list, tuple)) else next(found)
        yield begin, end, [plain(data) if isinstance(data, Shard) else data]
