"""torch: a process per replica.

Alone, a process is the first replica and starts those of the others; in a run of several processes
each of them is a replica.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import torch

from unisono.backends.torch.collectives import TorchCollectives
from unisono.backends.torch.cpu_layers import leave_kernels, use_kernels
from unisono.backends.torch.custom_loop import TorchLoop
from unisono.backends.torch.devices import move_to
from unisono.backends.torch.distributed import world_group
from unisono.backends.torch.multi_process import TorchWorldReplicas
from unisono.backends.torch.placement import CANNOT_LOG, device_scope, locate
from unisono.backends.torch.trainer import TorchReplicas
from unisono.devices import Placement
from unisono.devices.locations import Location
from unisono.replication.checksums import names_of, own_checksums


class TorchBackend:
    """Replicas as processes."""

    backend = "torch"

    def num_gpus(self) -> int:
        return int(torch.cuda.device_count())

    def prepare(self, placement: Placement) -> None:
        """Processes can be started at any time."""

    def replicate(
        self, model: keras.Model, placement: Placement, *, sync_batch_norm: bool
    ) -> "SingleReplica | TorchReplicas | TorchWorldReplicas":
        if placement.num_replicas == 1:
            return SingleReplica(model, placement, sync_batch_norm)
        kind = TorchReplicas if placement.num_processes == 1 else TorchWorldReplicas
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
        return CANNOT_LOG


class SingleReplica:
    """One replica in this process: plain Keras, on the device that was asked for.

    Only layers for images compute by cpu_layers' ways, as they do on many replicas.
    """

    def __init__(self, model: keras.Model, placement: Placement, sync_batch_norm: bool) -> None:
        self.placement = placement
        self.sync_batch_norm = sync_batch_norm
        self.feed = None
        self._model = model
        move_to(model, placement)
        use_kernels(model, lambda: None, sync_batch_norm=False, is_alone=True)

    def release(self) -> None:
        leave_kernels(self._model)

    def settle(self, when: str) -> None:
        """The replica is in this process."""

    def variable_names(self) -> list[str]:
        return names_of(self._model)

    def checksums(self) -> list[list[int]]:
        return [own_checksums(self._model)]
