"""Batches on their way to a replica's device.

A batch stays on the host until it is known which replica's device needs which rows. Then those rows
are copied from pinned memory by a stream of their own, so that neither the host nor the step before
waits for the copy. The next batch of arrays is read by a thread while a step runs.
"""

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import torch

from unisono.backends.torch.devices import default_device
from unisono.data.arrays import ShardedArrays, WrappedArrays
from unisono.data.feed import Shard
from unisono.keras_internals import convert_to_sliceable, fields_of


def on_host(leaf: Any) -> Any:
    """A tensor of what a batch consists of, in the host's memory; tensors stay where they are."""
    if leaf is None or isinstance(leaf, torch.Tensor):
        return leaf
    with keras.device("cpu"):
        return keras.ops.convert_to_tensor(leaf)


def to_device(leaf: Any) -> Any:
    """A tensor of a batch on this process' device; the host does not wait for the copy."""
    device = default_device()
    if not isinstance(leaf, torch.Tensor) or device.type != "cuda" or leaf.device.type != "cpu":
        return leaf
    index = torch.cuda.current_device() if device.index is None else device.index
    stream, current = _copy_stream(index), torch.cuda.current_stream(index)
    with torch.cuda.stream(stream):
        copy = leaf.pin_memory().to(torch.device("cuda", index), non_blocking=True)
    current.wait_stream(stream)
    # Its memory belongs to the stream that it was copied by: not to be used again before the step
    # is done with it.
    copy.record_stream(current)
    return copy


@functools.cache
def _copy_stream(index: int) -> Any:
    return torch.cuda.Stream(index)


# -- arrays ---------------------------------------------------------------------------------------


class HostArrays(WrappedArrays):
    """Keras' adapter of arrays, whose batches stay on the host."""

    def get_torch_dataloader(self) -> "HostLoader":
        loader = self.arrays.get_torch_dataloader()
        return HostLoader(loader, has_fixed_order=_has_fixed_order(self))


def sharded_loader(shards: ShardedArrays) -> "HostLoader":
    """This process' shards of arrays; see ShardedArrays."""

    def rows_of(sliceable: Any, rows: Any) -> Any:
        return on_host(sliceable.convert_to_torch_compatible(sliceable[rows]))

    inputs = convert_to_sliceable(fields_of(shards.arrays).inputs, target_backend="torch")
    order = shards.order.get_torch_dataloader()
    loader = _Mapped(order, lambda found: shards.shard(inputs, found.numpy(), rows_of))
    return HostLoader(loader, has_fixed_order=_has_fixed_order(shards))


def _has_fixed_order(adapter: WrappedArrays) -> bool:
    # Within a batch, Keras draws the order when it comes to the batch: a thread would draw from
    # torch's generator before the step that comes first.
    return fields_of(adapter.arrays).shuffle != "batch"


class _Mapped:
    """A loader with a function applied to what it loads."""

    def __init__(self, loader: Any, function: Any) -> None:
        self._loader = loader
        self._function = function

    def __iter__(self) -> Iterator[Any]:
        return map(self._function, self._loader)

    def __len__(self) -> int:
        return len(self._loader)


class HostLoader:
    """A loader of batches in the host's memory; it can be iterated again.

    For a GPU, a thread reads one batch ahead into pinned memory, where that changes nothing.
    """

    def __init__(self, loader: Any, *, has_fixed_order: bool) -> None:
        self._loader = loader
        self._has_fixed_order = has_fixed_order

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        if self._has_fixed_order and default_device().type == "cuda":
            return _one_ahead(batches)
        return _each_on_host(batches)

    def __len__(self) -> int:
        return len(self._loader)


_END = object()


def _each_on_host(batches: Iterator[Any]) -> Iterator[Any]:
    while (batch := _next_on_host(batches)) is not _END:
        yield batch


def _one_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    with ThreadPoolExecutor(1, "unisono-batches") as thread:
        coming = thread.submit(_next_pinned, batches)
        while (batch := coming.result()) is not _END:
            coming = thread.submit(_next_pinned, batches)
            yield batch


def _next_pinned(batches: Iterator[Any]) -> Any:
    def pinned(leaf: Any) -> Any:
        is_on_host = isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"
        return leaf.pin_memory() if is_on_host else leaf

    batch = _next_on_host(batches)
    if isinstance(batch, Shard):
        return batch._replace(data=keras.tree.map_structure(pinned, batch.data))
    return batch if batch is _END else keras.tree.map_structure(pinned, batch)


def _next_on_host(batches: Iterator[Any]) -> Any:
    with keras.device("cpu"):
        return next(batches, _END)
