"""Collectives between the processes of torch replicas: NCCL on GPUs, gloo on CPUs.

The group is our own object, not torch.distributed's default one: that stays free for the user, and
Keras 3.16, which averages gradients by itself once the default group exists, leaves ours alone.
Processes find each other through a file in a private folder; sockets are bound to loopback.
"""

import contextlib
import datetime
from collections.abc import Sequence
from typing import Any

import keras
import torch
import torch.distributed as dist

from unisono.data import share_bounds, share_sizes
from unisono.engines.step import StepState

TIMEOUT = datetime.timedelta(minutes=10)


class PeerLost(RuntimeError):
    """A collective failed, most likely because another replica's process is gone."""


class Group:
    """The replicas of one placement."""

    def __init__(self, path: str, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        store = dist.FileStore(path, size)
        self._group: Any
        if device.type == "cuda":
            self._group = dist.ProcessGroupNCCL(store, rank, size, TIMEOUT)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = TIMEOUT
            self._group = dist.ProcessGroupGloo(store, rank, size, options)

    def add_up(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sums over all replicas, one collective per data type."""
        results: list[Any] = [None] * len(tensors)
        by_type: dict[torch.dtype, list[int]] = {}
        for i, tensor in enumerate(tensors):
            by_type.setdefault(tensor.dtype, []).append(i)
        for places in by_type.values():
            flat = torch.cat([tensors[i].detach().reshape(-1) for i in places])
            self._wait(lambda flat=flat: self._group.allreduce([flat]))
            parts = flat.split([tensors[i].numel() for i in places])
            for i, part in zip(places, parts, strict=True):
                results[i] = part.view(tensors[i].shape)
        return results

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor of every replica, all of one shape."""
        own = tensor.detach().contiguous()
        # As bytes: gloo has no gather for booleans and some small types.
        own_bytes = own.reshape(-1).view(torch.uint8)
        parts = [torch.empty_like(own_bytes) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([parts], [own_bytes]))
        return [part.view(own.dtype).view(own.shape) for part in parts]

    def concatenate(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """The tensors of all replicas joined along an axis, on which they may differ in length."""
        rows = tensor.detach().movedim(axis, 0)
        sizes = self.gather(torch.tensor([len(rows)], device=self.device))
        return torch.cat(self.gather_rows(rows, [int(n) for n in sizes])).movedim(0, axis)

    def gather_rows(self, tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """The rows of every replica; replica r has sizes[r] of them."""
        most = max(sizes)
        own = tensor.detach()
        if len(own) < most:
            own = torch.cat([own, own.new_zeros((most - len(own), *own.shape[1:]))])
        parts = self.gather(own)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite tensors with those of the first replica."""
        with torch.no_grad():
            for tensor in tensors:
                whole = tensor.detach().contiguous()
                self._wait(lambda whole=whole: self._group.broadcast(whole, 0))
                if self.rank and whole.data_ptr() != tensor.data_ptr():
                    tensor.copy_(whole)

    def _wait(self, start: Any) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise PeerLost(str(error)) from error


class TorchReplica:
    """One replica in the middle of a step; see step.Replica."""

    may_be_empty = False

    def __init__(self, group: Group, num_rows: int, *, is_whole: bool = False) -> None:
        """`is_whole`: a batch smaller than the replicas, which runs whole on each."""
        self.state = StepState()
        self.group = group
        self.num_rows = num_rows
        self._is_whole = is_whole
        self._sizes = share_sizes(num_rows, group.size)
        self.share = 1.0 / group.size if is_whole else self._sizes[group.rank] / num_rows
        self.metric_factor = 1.0 / group.size if is_whole else 1.0

    def after_data(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def gather_rows(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_whole or len(x) != self._sizes[self.group.rank]:
            return x  # Not one row a sample, so there is nothing to put in order.
        parts = self.group.gather_rows(x, self._sizes)
        parts[self.group.rank] = x  # The one part that gradients flow into.
        return torch.cat(parts)

    def follow_changes(self, own: Any, gathered: Any) -> None:
        # Keras multiplies weights by a mask in place, and weighted metrics read them afterwards.
        start = sum(self._sizes[: self.group.rank])
        for mine, every in zip(keras.tree.flatten(own), keras.tree.flatten(gathered), strict=True):
            if isinstance(mine, torch.Tensor) and every is not mine:
                mine.copy_(every[start : start + len(mine)])

    def with_global_gradient(self, loss: torch.Tensor) -> torch.Tensor:
        scaled = loss / self.share
        return scaled + (loss - scaled).detach()

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        stacked: torch.Tensor = _Stack.apply(x, self)
        return stacked

    def total(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.group.add_up(tensors)

    def reduce_gradients(
        self,
        gradients: Sequence[torch.Tensor | None],
        variables: Sequence[Any],
        weight: float,
    ) -> list[torch.Tensor | None]:
        # A gradient may exist on some replicas only (a branch that depends on the data).
        has = [float(gradient is not None) for gradient in gradients]
        weighted = [
            torch.zeros_like(variable.value) if gradient is None else gradient * weight
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        flags = torch.tensor(has, dtype=torch.float32, device=self.group.device)
        *totals, count = self.group.add_up([*weighted, flags])
        return [total if n else None for total, n in zip(totals, count.tolist(), strict=True)]


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, replica: TorchReplica) -> torch.Tensor:
        ctx.replica = replica
        return torch.stack(replica.group.gather(x))

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        replica = ctx.replica
        share = 1.0 if replica.state.is_weighted else replica.share
        (total,) = replica.group.add_up([upstream[0] * share])
        return total[replica.group.rank] / share, None


def own_rows(num_rows: int, group: Group) -> slice:
    """The rows of a global batch that belong to this replica."""
    return slice(*share_bounds(num_rows, group.size, group.rank))
