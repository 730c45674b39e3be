"""torch: one process per replica.

Outside of a run, a process is the first replica and starts a worker process for each of the others;
in a run of several processes each of them is a replica.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import torch

from unisono.backends.torch.cpu_layers import chosen_layers
from unisono.backends.torch.custom_loop import TorchLoop
from unisono.backends.torch.devices import device_scope, locate, move_to
from unisono.backends.torch.process_group import TorchCollectives, world_group
from unisono.backends.torch.trainer import TorchTrainer
from unisono.devices import Placement
from unisono.devices.locations import Location
from unisono.replication.checksums import names_of, own_checksums


class TorchBackend:
    """See base.Backend."""

    def num_gpus(self) -> int:
        return int(torch.cuda.device_count())

    def prepare(self, placement: Placement) -> None:
        """Processes can be started at any time."""

    def replicate(
        self, model: keras.Model, placement: Placement, *, sync_batch_norm: bool
    ) -> "SingleReplica | TorchTrainer":
        kind = SingleReplica if placement.num_replicas == 1 else TorchTrainer
        return kind(model, placement, sync_batch_norm=sync_batch_norm)

    def custom_loop(self, placement: Placement) -> TorchLoop:
        return TorchLoop(placement)

    def collectives(self, ranks: Sequence[int] | None = None) -> TorchCollectives:
        return TorchCollectives(world_group(ranks))

    def device_scope(self, placement: Placement) -> AbstractContextManager[None]:
        return device_scope(placement)

    def locate(self, values: Sequence[Any]) -> list[Location | None]:
        return locate(values)

    def log_placement(self, is_on: bool) -> str | None:
        return "torch keeps no record of where each op ran"


class SingleReplica:
    """A model on one device: plain Keras, but for layers that `unisono run` replaces on CPUs."""

    feed = None

    def __init__(self, model: keras.Model, placement: Placement, *, sync_batch_norm: bool) -> None:
        self.placement = placement
        self.sync_batch_norm = sync_batch_norm
        self._model = model
        move_to(model, placement)
        self._layers = chosen_layers(placement)
        if self._layers is not None:
            self._layers.use_kernels(model, lambda: None, sync_batch_norm=False)

    def release(self) -> None:
        if self._layers is not None:
            self._layers.leave_kernels(self._model)

    def settle(self, when: str) -> None:
        """The replica is in this process."""

    def variable_names(self) -> list[str]:
        return names_of(self._model)

    def checksums(self) -> list[list[int]]:
        return [own_checksums(self._model)]
