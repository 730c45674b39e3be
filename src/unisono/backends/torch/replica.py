"""One torch replica in the middle of a step, in whichever process it runs."""

import weakref
from collections.abc import Sequence
from typing import Any

import keras
import torch

from unisono.backends.torch.process_group import Group
from unisono.data.shards import shard_bounds, share_sizes
from unisono.errors import StrategyError
from unisono.hooks import original
from unisono.replication.replication import Replication
from unisono.replication.step import StepState, not_reduced_error

_current: "TorchReplica | None" = None
_checked: weakref.WeakSet[Any] = weakref.WeakSet()


class TorchReplica:
    """One replica in the middle of a step; see step.Replica."""

    may_be_empty = False

    def __init__(self, group: Group, num_rows: int, *, is_replicated: bool = False) -> None:
        """`is_replicated`: a batch smaller than the replicas, which runs whole on each."""
        self.state = StepState()
        self.group = group
        self.num_rows = num_rows
        self._is_whole = is_replicated
        self._sizes = share_sizes(num_rows, group.size)
        self.share = 1.0 / group.size if is_replicated else self._sizes[group.rank] / num_rows
        self.metric_factor = 1.0 / group.size if is_replicated else 1.0
        self.sum_scale = 1.0 if is_replicated else 1.0 / self.share

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
        if self._is_whole:
            return loss  # Nothing was gathered: every replica has the gradient of all rows.
        scaled = loss / self.share
        return scaled + (loss - scaled).detach()

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        stacked: torch.Tensor = _Stack.apply(x, self)
        return stacked

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.group.add_up(tensors)

    def reduce_gradients(
        self,
        gradients: Sequence[torch.Tensor | None],
        variables: Sequence[Any],
        weight: float,
    ) -> list[torch.Tensor | None]:
        # A gradient may exist on some replicas only (a branch that depends on the data).
        is_missing = [gradient is None for gradient in gradients]
        own = [
            torch.zeros_like(_value(variable)) if gradient is None else gradient.to_dense()
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        if weight != 1.0:
            own = [gradient * weight for gradient in own]
        flags = torch.tensor(is_missing, dtype=torch.float32, device=self.group.device)
        *totals, num_missing = self.group.add_up([*own, flags])
        # Optimizers of sparse gradients take no others.
        totals = [
            total if gradient is None or not gradient.is_sparse else total.to_sparse(1)
            for total, gradient in zip(totals, gradients, strict=True)
        ]
        if not any(is_missing):
            return totals
        return [
            None if n == self.group.size else total
            for total, n in zip(totals, num_missing.tolist(), strict=True)
        ]

    def check_reduced(self, optimizer: Any, gradients: Sequence[torch.Tensor | None]) -> None:
        if optimizer in _checked:
            return  # Once: the answer has to come to the host.
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


def begin(replica: TorchReplica | None) -> None:
    """Make a replica the current one of this process; None when its step has ended."""
    global _current
    _current = replica


def run_step(
    model: keras.Model, replication: Replication, name: str, data: Any, replica: TorchReplica
) -> Any:
    """One replica's part of a step: the logs, or the predictions for all rows."""
    begin(replica)
    try:
        if name != "predict_step":
            return replication.run(name, data)
        outputs = original(model, name)(data)
        return keras.tree.map_structure(replica.gather_rows, outputs)
    finally:
        begin(None)


def check_equal(replica: TorchReplica, variables: Sequence[Any]) -> None:
    """Replicas must begin with the same weights; nothing else would make them agree later."""
    if not variables:
        return
    # As bits: what is not a number must not look different from itself.
    sums = torch.stack([_value(variable).detach().double().sum() for variable in variables])
    sums = sums.view(torch.int64)
    every = replica.group.all_gather(sums)
    if not all(torch.equal(every[0], other) for other in every[1:]):
        raise StrategyError(
            "The replicas begin with different weights. Make the model from the same seed on each "
            "(keras.utils.set_random_seed), or load the same file."
        )


def _value(variable: Any) -> torch.Tensor:
    """The tensor of a Keras variable, or a parameter itself."""
    value: torch.Tensor = variable.value if isinstance(variable, keras.Variable) else variable
    return value


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, replica: TorchReplica) -> torch.Tensor:
        ctx.replica = replica
        return torch.stack(replica.group.all_gather(x))

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        replica = ctx.replica
        share = 1.0 if replica.state.is_weighted else replica.share
        (total,) = replica.group.add_up([upstream[0] * share])
        return total[replica.group.rank] / share, None


def own_rows(num_rows: int, group: Group) -> slice:
    """The rows of a global batch that belong to this replica."""
    return slice(*shard_bounds(num_rows, group.size, group.rank))
