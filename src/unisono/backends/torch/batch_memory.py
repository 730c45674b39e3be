"""The rows of batches in memory that a process shares with its workers.

Rows are written once; only their place in the memory is sent. The memory has two halves, used in
turn. On GPUs nothing else keeps the writer from running ahead, as collectives do not block there:
so each worker counts the batches that it has read, at the begin of the memory.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import torch

from unisono.backends.torch.batches import to_device
from unisono.backends.torch.devices import default_device
from unisono.backends.torch.replica import has_rows
from unisono.launch.channel import SharedMemory

_ALIGNMENT = 64
_POLL_S = 0.0002


@dataclass(frozen=True)
class Place:
    """Where a tensor of the global batch lies in shared memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_split: bool
    """Whether it has one row per sample, of which a replica reads its own."""

    def view(self, memory: SharedMemory) -> torch.Tensor:
        count = int(np.prod(self.shape, dtype=np.int64))
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory.buffer, dtype=self.dtype, count=count, offset=self.offset)
        return flat.view(self.shape)


class BatchWriter:
    """The side of the process that has the batches."""

    def __init__(self, num_replicas: int, hand_over: Callable[[SharedMemory], None]) -> None:
        """`hand_over(memory)`: give new memory to all workers."""
        self._num_replicas = num_replicas
        self._hand_over = hand_over
        self._memory: SharedMemory | None = None
        self._num_written = 0

    def write(self, data: Any, num_rows: int, check_workers: Callable[[], None]) -> Any:
        """Write the other replicas' rows; returns a `Place` for each tensor.

        `check_workers()` raises when one is gone that has still to read.
        """
        leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
        needed = sum(leaf.numel() * leaf.element_size() + _ALIGNMENT for leaf in leaves)
        start = _ALIGNMENT + 8 * self._num_replicas
        if self._memory is None or start + 2 * needed > self._memory.num_bytes:
            self._renew(start + 4 * needed)
        memory = self._memory
        assert memory is not None
        self._num_written += 1
        while _counts(memory, self._num_replicas)[1:].min() < self._num_written - 2:
            check_workers()
            time.sleep(_POLL_S)
        offset = start + self._num_written % 2 * ((memory.num_bytes - start) // 2)
        first = num_rows // self._num_replicas

        def write(leaf: Any) -> Any:
            nonlocal offset
            if leaf is None:
                return None
            offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
            place = Place(offset, tuple(leaf.shape), leaf.dtype, has_rows(leaf, num_rows))
            offset += leaf.numel() * leaf.element_size()
            view, source = place.view(memory), leaf.detach()
            if place.is_split:
                view, source = view[first:], source[first:]
            view.copy_(source)
            return place

        return keras.tree.map_structure(write, data)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _renew(self, num_bytes: int) -> None:
        self.close()
        self._memory, self._num_written = SharedMemory.create(num_bytes), 0
        self._hand_over(self._memory)


class BatchReader:
    """The side of a worker."""

    def __init__(self, memory: SharedMemory, rank: int, num_replicas: int) -> None:
        self._memory = memory
        self._counts = _counts(memory, num_replicas)
        self._rank = rank

    def read(self, layout: Any, rows: slice) -> Any:
        """A batch on this process' device, with these rows of it."""

        def read(place: Place | None) -> Any:
            if place is None:
                return None
            view = place.view(self._memory)
            own = view[rows] if place.is_split else view
            # A copy: the memory is written again, and a layer may keep its input.
            return own.pin_memory() if default_device().type == "cuda" else own.clone()

        data = keras.tree.map_structure(read, layout)
        self._counts[self._rank] += 1
        return keras.tree.map_structure(to_device, data)


def _counts(memory: SharedMemory, num_replicas: int) -> Any:
    """How many batches each replica has read."""
    return np.frombuffer(memory.buffer, np.int64, num_replicas)
