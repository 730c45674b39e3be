"""Eager collectives on torch, over all processes of a run or some of them.

Shapes and types must agree between processes: whoever calls makes sure of that first. Tensors may
be anywhere; they travel by way of the group's device and come back to theirs.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from unisono.backends.torch.process_group import Group

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
# What a sum or a product of truth values is: whether one, or all, are true.
_OPS_OF_BOOLEANS = {"sum": "max", "min": "min", "max": "max", "product": "min"}
# Types that gloo cannot compute with, and one that holds all their values.
_WIDER = {
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}


class TorchCollectives:
    """See base.Collectives."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank = group.rank
        self.size = group.size

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
        results: dict[int, torch.Tensor] = {}
        by_op: dict[str, list[int]] = {}
        for i, tensor in enumerate(tensors):
            is_truth = tensor.dtype == torch.bool
            by_op.setdefault(_OPS_OF_BOOLEANS[op] if is_truth else op, []).append(i)
        for name, places in by_op.items():
            wide = [self._here(tensors[i]) for i in places]
            wide = [tensor.to(_WIDER.get(tensor.dtype, tensor.dtype)) for tensor in wide]
            for i, total in zip(places, self._group.all_reduce(wide, _OPS[name]), strict=True):
                results[i] = total.to(tensors[i])
        return [results[i] for i in range(len(tensors))]

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        own = self._here(tensor)
        if own.ndim == 0:
            return [part.to(tensor.device) for part in self._group.all_gather(own)]
        sizes = self._group.gather_sizes(len(own))
        return [part.to(tensor.device) for part in self._group.gather_rows(own, sizes)]

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int) -> list[torch.Tensor]:
        copies = [
            self._here(tensor).clone(memory_format=torch.contiguous_format) for tensor in tensors
        ]
        self._group.broadcast(copies, root)
        return [copy.to(tensor.device) for copy, tensor in zip(copies, tensors, strict=True)]

    def reduce_scatter(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        # gloo's own wants equal shares, which rows need not give.
        (total,) = self.all_reduce([tensor], op)
        each, more = divmod(len(total), self.size)
        start = self.rank * each + min(self.rank, more)
        return total[start : start + each + (self.rank < more)]

    def all_to_all(
        self, tensor: torch.Tensor, splits: Sequence[int]
    ) -> tuple[torch.Tensor, list[int]]:
        own = self._here(tensor)
        every = self._group.all_gather(torch.tensor(list(splits), device=own.device))
        received = [int(sent[self.rank]) for sent in every]
        rows = self._group.exchange_rows(own, splits, received)
        return rows.to(tensor.device), received

    def barrier(self) -> None:
        self._group.barrier()

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self._group.device)
