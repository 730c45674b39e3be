"""A custom training loop on torch: the same program in one process per replica.

A step begins when a distributed dataset yields this replica's rows and ends when the next batch is
requested; the user's loop body lies between them, with or without `strategy.run`. As in
DistributedDataParallel, a loss counts as the mean of a replica's rows, unless it comes from
`compute_average_loss`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import torch

from unisono.backends.torch.batches import to_device
from unisono.backends.torch.cpu_layers import chosen_layers
from unisono.backends.torch.devices import default_device
from unisono.backends.torch.native_optimizers import reduce_in_place
from unisono.backends.torch.process_group import Group, world_group
from unisono.backends.torch.replica import (
    TorchReplica,
    check_equal,
    current_replica,
    own_rows,
    set_current,
    stepping,
)
from unisono.devices import Placement
from unisono.errors import StrategyError
from unisono.replication.custom_loop import LoopReplication, living_keras_objects
from unisono.replication.introspection import seed_states
from unisono.replication.step import seed_stride


class TorchLoop:
    """See base.CustomLoop."""

    def __init__(self, placement: Placement) -> None:
        self.num_replicas = placement.num_replicas
        self._is_in_world = placement.num_processes > 1
        self._replication = LoopReplication(current_replica, check_equal, chosen_layers(placement))
        self._seeds: dict[int, Any] = {}

    def begin_epoch(self) -> None:
        self.end_epoch()
        group = self._group_or_none()
        if group is None:
            return
        models, optimizers, metrics = living_keras_objects()
        self._replication.take(models, optimizers, metrics)
        for model in models:
            for state in seed_states(model):
                self._spread_seed(state, group)

    def split(self, batch: Any, num_rows: int) -> Any:
        self._finish()
        group = self._group_or_none()
        batch = keras.tree.map_structure(torch.as_tensor, batch)
        if group is None:
            return keras.tree.map_structure(_put, batch)
        is_replicated = num_rows < group.size
        replica = TorchReplica(group, num_rows, is_replicated=is_replicated)
        self._replication.start(replica)
        set_current(replica)
        rows = slice(None) if is_replicated else own_rows(num_rows, group)
        return keras.tree.map_structure(lambda leaf: _put(leaf[rows]), batch)

    def end_epoch(self) -> None:
        self._finish()

    def run(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        group = self._group_or_none()
        if group is None or current_replica() is not None:
            return step(*args, **kwargs)
        # Without a batch of a distributed dataset, every replica has the same weight.
        replica = TorchReplica(group, group.size)
        self._replication.start(replica)
        with stepping(replica):
            result = step(*args, **kwargs)
            self._replication.finish(replica)
            return result

    def reduce(self, how: str, value: Any, axis: int | None) -> Any:
        def reduce_leaf(leaf: Any) -> Any:
            _check(leaf)
            count = torch.tensor(1.0 if axis is None else leaf.shape[axis], device=leaf.device)
            own = leaf.detach() if axis is None else leaf.detach().sum(axis)
            group = self._group_or_none()
            if group is not None:
                own, count = group.all_reduce([own, count])
            return own if how == "sum" else own / count

        return keras.tree.map_structure(reduce_leaf, value)

    def gather(self, value: Any, axis: int) -> Any:
        def gather_leaf(leaf: Any) -> Any:
            _check(leaf)
            group = self._group_or_none()
            return leaf if group is None else group.concatenate(leaf, axis)

        return keras.tree.map_structure(gather_leaf, value)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        return (value,)

    def reduce_gradients(self, gradients: Any) -> Any:
        if not isinstance(gradients, torch.nn.Module):
            gradients = list(gradients)  # `model.parameters()` can be read only once.
        parameters = _parameters(gradients)
        group = self._group_or_none()
        if group is None:
            return gradients if parameters is None else [p.grad for p in parameters]
        replica = current_replica() or TorchReplica(group, group.size)
        if parameters is not None:
            self._replication.leave_gradients(replica)
            reduce_in_place(replica, parameters)
            return [parameter.grad for parameter in parameters]
        is_missing = torch.tensor([g is None for g in gradients], device=group.device)
        if any(not torch.equal(is_missing, other) for other in group.all_gather(is_missing)):
            raise StrategyError(
                "Asked to reduce a list of gradients that are None on some replicas only. Pass the "
                "model or its parameters instead: their `.grad` is then reduced in place."
            )
        known = [g for g in gradients if g is not None]
        totals = iter(self._replication.reduce_gradients(replica, known, known))
        return [None if g is None else next(totals) for g in gradients]

    def replicate(self, state: Any) -> Any:
        """Every process makes its own state, from the same seed."""
        return state

    def num_rows(self) -> Any:
        replica = current_replica()
        return None if replica is None else replica.num_rows

    def part_of_sum(self, value: Any) -> Any:
        replica = current_replica()
        if replica is None:
            return value
        # Scale its gradient to that of a mean over rows, like the other losses of a loop: weights
        # of gradients then sum to one, and gradients that were reduced before stay as they are.
        part = _WithGradientOfMean.apply(value * replica.metric_factor, replica.share)
        replica.state.parts_of_sums[id(part)] = part
        return part

    def num_parts(self) -> int:
        replica = current_replica()
        # Where every replica runs the whole batch, `part_of_sum` divides already.
        return 1 if replica is None or replica.metric_factor != 1.0 else self.num_replicas

    def _group_or_none(self) -> Group | None:
        if self.num_replicas == 1:
            return None
        if not self._is_in_world:
            raise StrategyError(
                f"Asked to run a custom training loop on {self.num_replicas} replicas; on torch it "
                "runs in one process per replica. Start the program with `unisono run --replicas "
                f"{self.num_replicas}`, or put the loop into a function and start that with "
                f"unisono.spawn(function, replicas={self.num_replicas})."
            )
        return world_group()

    def _finish(self) -> None:
        replica = current_replica()
        if replica is not None:
            self._replication.finish(replica)
            set_current(None)

    def _spread_seed(self, state: Any, group: Group) -> None:
        if id(state) not in self._seeds:
            self._seeds[id(state)] = state
            state._value.data[0] += group.rank * seed_stride()


class _WithGradientOfMean(torch.autograd.Function):
    """The identity; divides the gradient by the replica's share, which weights it later."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, share: float) -> torch.Tensor:
        ctx.share = share
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return upstream[0] / ctx.share, None


def _parameters(what: Any) -> list[torch.Tensor] | None:
    """The parameters of a model, or those in a list; None for a list of gradients."""
    if isinstance(what, torch.nn.Module):
        return list(what.parameters())
    parts = [v.value if isinstance(v, keras.Variable) else v for v in what]
    is_parameter = [isinstance(part, torch.nn.Parameter) for part in parts]
    return parts if any(is_parameter) else None


def _put(leaf: torch.Tensor) -> torch.Tensor:
    placed: torch.Tensor = to_device(leaf).to(default_device())
    return placed


def _check(value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise StrategyError(
            f"Asked to reduce or gather a {type(value).__name__} over replicas, which is not a "
            "tensor. Pass what strategy.run returned."
        )
