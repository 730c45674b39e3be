"""Try a step on torch, to learn what its losses are: see loss_check."""

from collections.abc import Sequence
from typing import Any, cast

import keras
import torch

from unisono.backends.torch.devices import default_device
from unisono.backends.torch.process_group import Group
from unisono.backends.torch.replica import TorchReplica, run_step
from unisono.replication.loss_check import find_kinds, num_rows_tried
from unisono.replication.loss_kinds import LossKinds
from unisono.replication.replication import Replication
from unisono.replication.step import StepState


class Twins:
    """Replicas that all have the same rows as this one; see torch_group.Group."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.device = default_device()

    def add_up(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.detach() * self.size for tensor in tensors]

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.detach()] * self.size

    def gather_rows(self, tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        return self.all_gather(tensor)


def learn_kinds(
    model: keras.Model, replication: Replication, name: str, data: Any, num_rows: int
) -> LossKinds:
    """What the losses of a step are, from the first of so many rows."""
    count = num_rows_tried(num_rows)
    split = [_is_split(leaf, num_rows) for leaf in keras.tree.flatten(data)]

    def taken(times: int) -> Any:
        flags = iter(split)
        return keras.tree.map_structure(
            lambda leaf: torch.cat([leaf[:count]] * times) if next(flags) else leaf, data
        )

    def try_step(has_twin: bool, state: StepState) -> None:
        group = cast(Group, Twins(2 if has_twin else 1))
        replica = TorchReplica(group, 2 * count)
        replica.state = state
        run_step(model, replication, name, taken(1 if has_twin else 2), replica)

    return find_kinds(model, name, try_step)


def _is_split(leaf: Any, num_rows: int) -> bool:
    return leaf is not None and leaf.ndim > 0 and len(leaf) == num_rows
