"""One torch replica in the middle of a step, in whichever process it runs.

Every process holds one replica, so the current one is a variable of this module. A `TorchReplica`
lives as long as its step; see replication.step.Replica for what the hooks on a model use it for.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import torch

from unisono.backends.torch.batch_norm import global_moments
from unisono.backends.torch.buckets import GradientBuckets
from unisono.backends.torch.process_group import Group
from unisono.data.shards import shard_bounds, shard_sizes
from unisono.errors import StrategyError
from unisono.replication.batch_norm import merged_moments
from unisono.replication.step import StepState, not_reduced_error

_current: "TorchReplica | None" = None
_checked: weakref.WeakSet[Any] = weakref.WeakSet()


class TorchReplica:
    """One replica in the middle of a step; see replication.step.Replica."""

    may_be_empty = False

    def __init__(self, group: Group, num_rows: int, *, is_replicated: bool = False) -> None:
        """`num_rows`: of the global batch. `is_replicated`: every replica runs all of its rows."""
        self.state = StepState()
        self.group = group
        self.buckets: GradientBuckets | None = None
        """Those in which this step's gradients are reduced while backward runs, if any."""
        self.num_rows = num_rows
        self._is_replicated = is_replicated
        self._sizes = shard_sizes(num_rows, group.size)
        self.share = 1.0 / group.size if is_replicated else self._sizes[group.rank] / num_rows
        self.metric_factor = 1.0 / group.size if is_replicated else 1.0
        self.sum_scale = 1.0 if is_replicated else 1.0 / self.share
        whole = (0, num_rows)
        self.bounds = whole if is_replicated else shard_bounds(num_rows, group.size, group.rank)

    def gather_rows(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_replicated or len(x) != self._sizes[self.group.rank]:
            return x  # Without one row per sample there is nothing to gather.
        shards = self.group.gather_rows(x, self._sizes)
        shards[self.group.rank] = x  # The one shard that gradients flow into.
        return torch.cat(shards)

    def follow_changes(self, own: Any, gathered: Any) -> None:
        # Keras multiplies weights by a mask in place, and weighted metrics read them afterwards.
        start = sum(self._sizes[: self.group.rank])
        for mine, every in zip(keras.tree.flatten(own), keras.tree.flatten(gathered), strict=True):
            if isinstance(mine, torch.Tensor) and every is not mine:
                mine.copy_(every[start : start + len(mine)])

    def with_global_gradient(self, loss: torch.Tensor) -> torch.Tensor:
        if self._is_replicated:
            return loss  # Nothing was gathered: every replica has the gradient of all rows.
        scaled = loss / self.share
        return scaled + (loss - scaled).detach()

    def moments(
        self, x: torch.Tensor, mask: Any, axes: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if mask is not None:
            return merged_moments(self, x, mask, axes)
        return global_moments(x, axes, self)

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        stacked: torch.Tensor = _Stack.apply(x, self)
        return stacked

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.group.all_reduce(tensors)

    def reduce_gradients(
        self,
        gradients: Sequence[torch.Tensor | None],
        variables: Sequence[Any],
        weight: float,
    ) -> list[torch.Tensor | None]:
        if self.buckets is not None and weight == 1.0:
            return self.buckets.reduce(gradients, variables, self._reduce_now)
        return self._reduce_now(gradients, variables, weight)

    def _reduce_now(
        self,
        gradients: Sequence[torch.Tensor | None],
        variables: Sequence[Any],
        weight: float = 1.0,
    ) -> list[torch.Tensor | None]:
        if not gradients:
            return []
        # A gradient may exist on some replicas only (a branch that depends on the data).
        is_missing = [gradient is None for gradient in gradients]
        own = [
            torch.zeros_like(_value(variable)) if gradient is None else gradient.to_dense()
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        if weight != 1.0:
            own = list(torch._foreach_mul(own, weight))
        # Each flag is a number of a kernel launch: a list would be copied while the host waits.
        flags = torch.zeros(len(own), device=self.group.device)
        for place, is_one in enumerate(is_missing):
            if is_one:
                flags[place].fill_(1.0)
        *sums, num_missing = self.group.all_reduce([*own, flags])
        # Optimizers of sparse gradients take no others.
        sums = [
            total if gradient is None or not gradient.is_sparse else total.to_sparse(1)
            for total, gradient in zip(sums, gradients, strict=True)
        ]
        if not any(is_missing):
            return sums
        return [
            None if n == self.group.size else total
            for total, n in zip(sums, num_missing.tolist(), strict=True)
        ]

    def check_reduced(self, optimizer: Any, gradients: Sequence[torch.Tensor | None]) -> None:
        if optimizer in _checked:
            return  # Only once, since it copies the result to the host.
        _checked.add(optimizer)
        own = [0.0 if g is None else g.detach().abs().sum().item() for g in gradients]
        every = self.group.all_gather(
            torch.tensor(own, dtype=torch.float64, device=self.group.device)
        )
        for other in every[1:]:
            if not torch.allclose(every[0], other, rtol=1e-5, equal_nan=True):
                raise StrategyError(not_reduced_error(optimizer))


def current_replica() -> TorchReplica | None:
    """The replica whose step is running in this process."""
    return _current


def set_current(replica: TorchReplica | None) -> None:
    """Make a replica the current one of this process; None when its step has ended."""
    global _current
    _current = replica


@contextmanager
def stepping(replica: TorchReplica) -> Iterator[None]:
    """Make a replica the current one inside the scope."""
    set_current(replica)
    try:
        yield
    finally:
        set_current(None)


def check_equal(replica: TorchReplica, variables: Sequence[Any]) -> None:
    """Raise StrategyError if variables differ: replicas that start apart would stay apart."""
    if not variables:
        return
    # As bits, so that NaN equals itself.
    sums = torch.stack([_value(variable).detach().double().sum() for variable in variables])
    every = replica.group.all_gather(sums.view(torch.int64))
    if not all(torch.equal(every[0], other) for other in every[1:]):
        raise StrategyError(
            "The replicas begin with different weights. Make the model from the same seed on each "
            "(keras.utils.set_random_seed), or load the same file."
        )


def own_rows(num_rows: int, group: Group) -> slice:
    """The rows of a global batch that belong to this replica."""
    return slice(*shard_bounds(num_rows, group.size, group.rank))


def count_rows(data: Any) -> int:
    """The rows of a batch, by the first of its tensors that has any dimension."""
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None and leaf.ndim]
    return len(leaves[0]) if leaves else 0


def has_rows(leaf: torch.Tensor | None, num_rows: int) -> bool:
    """Whether a tensor of a batch has one row per sample, so that replicas split it."""
    return leaf is not None and leaf.ndim > 0 and len(leaf) == num_rows


def _value(variable: Any) -> torch.Tensor:
    """The tensor of a Keras variable, or a parameter itself."""
    value: torch.Tensor = variable.value if isinstance(variable, keras.Variable) else variable
    return value


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, replica: TorchReplica) -> torch.Tensor:
        ctx.replica = replica
        stacked: torch.Tensor = replica.group.stack(x)
        return stacked

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        replica = ctx.replica
        weight = 1.0 if replica.state.is_weighted else replica.share
        (total,) = replica.group.all_reduce([upstream[0] * weight])
        return total[replica.group.rank] / weight, None
