"""A user's own training loop under torch: the same program in one process per replica.

A step begins when a distributed data set yields this replica's rows, and ends when the next batch
is asked for: the loop body of the user lies between them, with or without `strategy.run`. As with
torch's own data parallel training, a loss counts as the mean of a replica's rows, unless it comes
from `compute_average_loss`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import torch

from unisono.devices import Placement
from unisono.engines.own_loop import LoopReplication, living_keras_objects
from unisono.engines.parts import seed_states
from unisono.engines.step import SEED_STRIDE
from unisono.engines.torch_group import Group, TorchReplica, own_rows
from unisono.engines.torch_replica import begin, current_replica
from unisono.engines.torch_team import default_device
from unisono.errors import StrategyError

_world: Group | None = None


def join_world(group: Group) -> None:
    """Make this process a replica of a loop that runs in one process for each."""
    global _world
    _world = group


def world() -> Group | None:
    """The replicas of the loop that this process belongs to."""
    return _world


class TorchLoop:
    """See base.OwnLoop."""

    def __init__(self, placement: Placement) -> None:
        self._group = _world
        self.num_replicas = placement.num_replicas if _world is None else _world.size
        self.is_one_of_many = _world is not None
        self._replication = LoopReplication(current_replica, _check_equal)
        self._seeds: dict[int, Any] = {}

    def begin_epoch(self) -> None:
        self.end_epoch()
        if self._group_or_none() is None:
            return
        models, optimizers, metrics = living_keras_objects()
        self._replication.take(models, optimizers, metrics)
        for model in models:
            for state in seed_states(model):
                self._spread_seed(state)

    def split(self, batch: Any, num_rows: int) -> Any:
        self._finish()
        group = self._group_or_none()
        device = default_device()
        batch = keras.tree.map_structure(lambda leaf: torch.as_tensor(leaf).to(device), batch)
        if group is None:
            return batch
        is_whole = num_rows < group.size
        replica = TorchReplica(group, num_rows, is_whole=is_whole)
        self._replication.start(replica)
        begin(replica)
        rows = slice(None) if is_whole else own_rows(num_rows, group)
        return keras.tree.map_structure(lambda leaf: leaf[rows], batch)

    def end_epoch(self) -> None:
        self._finish()

    def run(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        group = self._group_or_none()
        if group is None or current_replica() is not None:
            return step(*args, **kwargs)
        # Not with a batch of a distributed data set: every replica counts alike.
        replica = TorchReplica(group, group.size)
        self._replication.start(replica)
        begin(replica)
        try:
            result = step(*args, **kwargs)
            self._replication.finish(replica)
            return result
        finally:
            begin(None)

    def reduce(self, how: str, value: Any, axis: int | None) -> Any:
        def reduce_leaf(leaf: Any) -> Any:
            _check(leaf)
            count = torch.tensor(1.0 if axis is None else leaf.shape[axis], device=leaf.device)
            own = leaf.detach() if axis is None else leaf.detach().sum(axis)
            group = self._group_or_none()
            if group is not None:
                own, count = group.add_up([own, count])
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
        part = value * replica.metric_factor
        replica.state.adds_up = True
        replica.state.parts_of_sums[id(part)] = part
        return part

    def num_parts(self) -> int:
        replica = current_replica()
        # Where a batch runs whole on each replica, `part_of_sum` divides already.
        return 1 if replica is None or replica.metric_factor != 1.0 else self.num_replicas

    def _group_or_none(self) -> Group | None:
        if self._group is None and self.num_replicas > 1:
            raise StrategyError(
                f"Asked to run an own training loop on {self.num_replicas} replicas; on torch it "
                "runs in one process per replica. Put the loop into a function and start it with "
                f"unisono.spawn(function, replicas={self.num_replicas})."
            )
        return self._group if self.num_replicas > 1 else None

    def _finish(self) -> None:
        replica = current_replica()
        if replica is not None:
            self._replication.finish(replica)
            begin(None)

    def _spread_seed(self, state: Any) -> None:
        if id(state) not in self._seeds and self._group is not None:
            self._seeds[id(state)] = state
            state._value.data[0] += self._group.rank * SEED_STRIDE


def _check_equal(replica: TorchReplica, variables: Sequence[Any]) -> None:
    """Replicas must begin with the same weights; nothing else would make them agree later."""
    sums = torch.stack([variable.value.detach().double().sum() for variable in variables])
    every = replica.group.gather(sums)
    if not all(torch.equal(every[0], other) for other in every[1:]):
        raise StrategyError(
            "The replicas begin with different weights. Make the model from the same seed on each "
            "(keras.utils.set_random_seed), or load the same file."
        )


def _check(value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise StrategyError(
            f"Asked to join the replicas' values of a {type(value).__name__}, which is not a "
            "tensor. Pass what strategy.run returned."
        )
