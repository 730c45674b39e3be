"""What one torch replica does in a step, in whichever process it runs."""

from typing import Any

import keras
import torch

from unisono.engines.hooks import original
from unisono.engines.parts import seed_states
from unisono.engines.replication import Replication
from unisono.engines.step import SEED_STRIDE
from unisono.engines.torch_carry import unpack
from unisono.engines.torch_group import Group, TorchReplica, own_rows
from unisono.engines.torch_team import Place, default_device
from unisono.launch.channel import SharedMemory

_current: TorchReplica | None = None


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


class WorkerModel:
    """The copy of a model in a worker's process."""

    def __init__(self, data: bytes, group: Group, sync_batch_norm: bool, seed: int) -> None:
        self._model, self._variables = unpack(data)
        self._group = group
        self._replication = Replication(
            self._model, current_replica, sync_batch_norm=sync_batch_norm
        )
        self._seeds = {id(state) for state in seed_states(self._model)}
        keras.utils.set_random_seed((seed + group.rank * SEED_STRIDE) % 2**31)

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
        self, name: str, layout: Any, memory: SharedMemory, num_rows: int, training: bool
    ) -> None:
        rows = own_rows(num_rows, self._group)
        data = keras.tree.map_structure(lambda place: _read(place, memory, rows), layout)
        if self._model.training != training:
            self._model.train(training)
        replica = TorchReplica(self._group, num_rows)
        with torch.set_grad_enabled(name == "train_step"):
            run_step(self._model, self._replication, name, data, replica)


def _read(place: Place | None, memory: SharedMemory, rows: slice) -> torch.Tensor | None:
    if place is None:
        return None
    view = place.view(memory)
    # A copy: the memory is written again two steps later, and a layer may keep its input.
    return (view[rows] if place.is_split else view).clone().to(default_device())
