"""Collectives between the processes of torch replicas: NCCL on GPUs, gloo on CPUs.

The group is our own object, not torch.distributed's default one: that stays free for the user, and
Keras 3.16, which averages gradients by itself once the default group exists, leaves ours alone.
Sockets are bound to one address: loopback, unless the processes are on several nodes.
"""

import datetime
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from unisono.devices.gloo_threads import patient_threads
from unisono.errors import PeerLostError

TIMEOUT = datetime.timedelta(minutes=10)
LOOPBACK = "127.0.0.1"
_SMALL_BYTES = 1 << 18
_COMBINE: dict[Any, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.PRODUCT: torch.mul,
}


class Group:
    """Some processes that compute together, each of a rank."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        device: torch.device,
        *,
        host: str = LOOPBACK,
    ) -> None:
        """`host`: the address at which the others reach this process."""
        self.rank = rank
        self.size = size
        self.device = device
        self._store = store  # torch does not keep a store alive that is written in Python.
        self._group: Any
        try:
            if device.type == "cuda":
                self._group = dist.ProcessGroupNCCL(store, rank, size, TIMEOUT)
            else:
                options = dist.ProcessGroupGloo._Options()
                options._timeout = TIMEOUT
                with patient_threads():
                    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
                self._group = dist.ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise PeerLostError(f"The processes did not find each other: {error}") from error

    def add_up(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sums over all replicas, one collective per data type."""
        return self.all_reduce(tensors, dist.ReduceOp.SUM)

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: Any) -> list[torch.Tensor]:
        """The tensors of all replicas made one, a collective per data type."""
        results: list[Any] = [None] * len(tensors)
        by_type: dict[torch.dtype, list[int]] = {}
        for i, tensor in enumerate(tensors):
            by_type.setdefault(tensor.dtype, []).append(i)
        for places in by_type.values():
            flat = torch.cat([tensors[i].detach().reshape(-1) for i in places])
            parts = self._reduce_flat(flat, op).split([tensors[i].numel() for i in places])
            for i, part in zip(places, parts, strict=True):
                results[i] = part.view(tensors[i].shape)
        return results

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor of every replica, all of one shape."""
        own = tensor.detach().contiguous()
        if not own.numel():
            return [own.clone() for _ in range(self.size)]
        # As bytes: gloo has no gather for booleans and some small types.
        data = own.reshape(-1).view(torch.uint8)
        if self._is_small(data):
            parts = list(self._exchange(data))
        else:
            parts = [torch.empty_like(data) for _ in range(self.size)]
            self._wait(lambda: self._group.allgather([parts], [data]))
        return [part.view(own.dtype).view(own.shape) for part in parts]

    def concatenate(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """The tensors of all replicas joined along an axis, on which they may differ in length."""
        rows = tensor.detach().movedim(axis, 0)
        return torch.cat(self.gather_rows(rows, self.gather_sizes(len(rows)))).movedim(0, axis)

    def gather_sizes(self, size: int) -> list[int]:
        """The number of every replica."""
        return [int(n) for n in self.all_gather(torch.tensor([size], device=self.device))]

    def gather_rows(self, tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """The rows of every replica; replica r has sizes[r] of them."""
        most = max(sizes)
        own = tensor.detach()
        if len(own) < most:
            own = torch.cat([own, own.new_zeros((most - len(own), *own.shape[1:]))])
        parts = self.all_gather(own)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        """Overwrite tensors with those of one replica, the first unless told."""
        with torch.no_grad():
            for tensor in tensors:
                whole = tensor.detach().contiguous()
                data = whole.reshape(-1).view(torch.uint8)
                self._wait(lambda data=data: self._group.broadcast(data, root))  # type: ignore[misc]
                if self.rank != root and whole.data_ptr() != tensor.data_ptr():
                    tensor.copy_(whole)

    def exchange_rows(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """Send `sent[r]` rows to each replica r, in order; the rows received, in replica order."""
        row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        own, every = (x.detach().contiguous().view(-1).view(torch.uint8) for x in (rows, result))
        if row_bytes:
            sizes = [[n * row_bytes for n in counts] for counts in (received, sent)]
            self._wait(lambda: self._group.alltoall_base(every, own, *sizes))
        return result

    def barrier(self) -> None:
        """Return when every replica has come here."""
        # Not the group's own: NCCL's guesses the device, and does not hold up the program.
        self.gather_sizes(0)

    def _reduce_flat(self, flat: torch.Tensor, op: Any) -> torch.Tensor:
        if self._is_small(flat):
            first, *others = self._exchange(flat.view(torch.uint8)).view(flat.dtype)
            # One after the other, so that every kind of processor comes to the same bits.
            return functools.reduce(_COMBINE[op], others, first)
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self._wait(lambda: self._group.allreduce([flat], options))
        return flat

    def _is_small(self, data: torch.Tensor) -> bool:
        return bool(self.device.type == "cpu" and self.size * data.nbytes <= _SMALL_BYTES)

    def _exchange(self, data: torch.Tensor) -> torch.Tensor:
        """Everyone's bytes, in one round of messages; gloo's own ways take several rounds."""
        every = data.new_empty(self.size * data.numel())
        self._wait(lambda: self._group.alltoall_base(every, data.repeat(self.size), [], []))
        return every.view(self.size, -1)

    def _wait(self, start: Callable[[], Any]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise PeerLostError(
                f"Another process of the group is gone, or does not answer: {error}"
            ) from error
