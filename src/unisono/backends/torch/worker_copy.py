"""The copy of a model in the process of a torch replica other than the first."""

from typing import Any

import keras
import torch

from unisono.backends.torch import cpu_layers
from unisono.backends.torch.devices import default_device
from unisono.backends.torch.model_pickle import unpack
from unisono.backends.torch.native_optimizers import hooked
from unisono.backends.torch.process_group import Group
from unisono.backends.torch.replica import TorchReplica, current_replica, own_rows, run_step
from unisono.backends.torch.worker_pool import Place
from unisono.launch.channel import SharedMemory
from unisono.replication.checksums import own_checksums
from unisono.replication.introspection import seed_states
from unisono.replication.loss_kinds import LossKinds
from unisono.replication.random_state import set_seed
from unisono.replication.replication import Replication
from unisono.replication.step import SEED_STRIDE


class WorkerModel:
    """One model, as a worker keeps it."""

    def __init__(self, data: bytes, group: Group, sync_batch_norm: bool, seed: int) -> None:
        self._model, self._variables = unpack(data)
        self._group = group
        self._replication = Replication(
            self._model,
            current_replica,
            sync_batch_norm=sync_batch_norm,
            kernels=cpu_layers,
        )
        self._seeds = {id(state) for state in seed_states(self._model)}
        set_seed((seed + group.rank * SEED_STRIDE) % 2**31)

    def send_checksums(self) -> None:
        own = torch.tensor(own_checksums(self._model), device=self._group.device)
        self._group.all_gather(own)

    def receive_values(self, places: list[int], trainable: list[bool]) -> None:
        self._group.broadcast([self._variables[i]._value for i in places])
        for i in places:
            if id(self._variables[i]) in self._seeds:
                # A stream of its own, so that no two replicas draw the same masks.
                self._variables[i]._value.data[0] += self._group.rank * SEED_STRIDE
        for variable, is_trainable in zip(self._variables, trainable, strict=True):
            if variable._trainable != is_trainable:
                variable.trainable = is_trainable

    def step(
        self,
        name: str,
        layout: Any,
        memory: SharedMemory,
        num_rows: int,
        training: bool,
        kinds: LossKinds | None,
    ) -> None:
        if kinds is not None:
            self._replication.learn(name, kinds)
        rows = own_rows(num_rows, self._group)
        data = keras.tree.map_structure(lambda place: _read(place, memory, rows), layout)
        if self._model.training != training:
            self._model.train(training)
        replica = TorchReplica(self._group, num_rows)
        with torch.set_grad_enabled(name == "train_step"), hooked():
            run_step(self._model, self._replication, name, data, replica)


def _read(place: Place | None, memory: SharedMemory, rows: slice) -> torch.Tensor | None:
    if place is None:
        return None
    view = place.view(memory)
    # A copy: the memory is written again two steps later, and a layer may keep its input.
    return (view[rows] if place.is_split else view).clone().to(default_device())
