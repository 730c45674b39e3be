"""A replica's copy of a model: the hooks on it, its part of each step, and its variables.

The process that runs `fit`, each of its workers and each process of a run hold one copy. Outside of
steps only the first replica's values count: what was changed there is broadcast before a step.
"""

from collections.abc import Sequence
from typing import Any, cast

import keras
import torch

from unisono.backends.torch.batches import to_device
from unisono.backends.torch.buckets import GradientBuckets
from unisono.backends.torch.devices import default_device
from unisono.backends.torch.native_optimizers import hooked
from unisono.backends.torch.process_group import Group
from unisono.backends.torch.replica import (
    TorchReplica,
    count_rows,
    current_replica,
    has_rows,
    stepping,
)
from unisono.hooks import original
from unisono.replication.introspection import seed_states
from unisono.replication.loss_check import find_kinds
from unisono.replication.loss_kinds import LossKinds
from unisono.replication.loss_trials import Gathers, TrialRows
from unisono.replication.replication import Kernels, Replication
from unisono.replication.step import StepState, seed_stride


class ModelCopy:
    """The copy of one model in this process."""

    def __init__(
        self, model: keras.Model, *, sync_batch_norm: bool, kernels: Kernels | None = None
    ) -> None:
        self.model = model
        self.sync_batch_norm = sync_batch_norm
        self.replication = Replication(
            model, current_replica, sync_batch_norm=sync_batch_norm, kernels=kernels
        )
        self.changes = ChangeTracker()
        self.buckets = GradientBuckets(model)

    @property
    def is_built(self) -> bool:
        return all(layer.built for layer in self.model._flatten_layers())

    def run_step(self, name: str, data: Any, replica: TorchReplica) -> Any:
        """Run a step on a replica's rows; returns its logs, or the predictions for all rows."""
        with hooked(), stepping(replica):
            if name == "train_step" and replica.state.trial is None:
                return self._run_train_step(data, replica)
            if name != "predict_step":
                return self.replication.run(name, data)
            outputs = original(self.model, name)(data)
            return keras.tree.map_structure(replica.gather_rows, outputs)

    def _run_train_step(self, data: Any, replica: TorchReplica) -> Any:
        state, buckets = replica.state, self.buckets
        buckets.begin_step(replica.group, lambda: bool(state.weighted_optimizers))
        replica.buckets = buckets
        try:
            logs = self.replication.run("train_step", data)
        except BaseException:
            buckets.clear()  # Without a wait for other replicas, which may be gone.
            raise
        buckets.end_step()
        return logs

    def find_kinds(self, name: str, data: Any) -> LossKinds:
        """Try a step, to learn whether its losses are means or sums over rows: see loss_check."""
        self.replication.prepare()
        num_rows = count_rows(data)

        def parts(places: Sequence[int], count: int) -> Any:
            def rows(leaf: Any) -> Any:
                if not has_rows(leaf, num_rows):
                    return to_device(leaf)
                taken = [leaf[place * count : (place + 1) * count] for place in places]
                return to_device(torch.cat(taken))

            return keras.tree.map_structure(rows, data)

        def try_step(rows: TrialRows, gathers: Gathers, state: StepState) -> None:
            group = cast(Group, _TrialGroup(rows, gathers))
            replica = TorchReplica(group, 2 * gathers.num_rows)
            replica.state = state
            self.run_step(name, parts(rows.parts, gathers.num_rows), replica)

        return find_kinds(self.model, name, num_rows, try_step)

    def follow_first(self, group: Group, places: Sequence[int]) -> None:
        """Overwrite tracked variables, by position, with the first replica's; a collective.

        Which variables are trainable follows as well.
        """
        variables = self.changes.variables
        trainable = torch.tensor([bool(v._trainable) for v in variables], device=group.device)
        group.broadcast([*(variables[i]._value for i in places), trainable])
        if group.rank == 0:
            return
        seeds = {id(state) for state in seed_states(self.model)}
        for i in places:
            if id(variables[i]) in seeds:
                # A random stream per replica, so that no two draw the same dropout masks.
                variables[i]._value.data[0] += group.rank * seed_stride()
        for variable, is_trainable in zip(variables, trainable.tolist(), strict=True):
            if variable._trainable != is_trainable:
                variable.trainable = is_trainable


class ChangeTracker:
    """Finds the variables that were written outside of a step, by torch's version counters."""

    def __init__(self) -> None:
        self.variables: list[Any] = []
        self._seen: dict[int, tuple[int, int, bool]] = {}

    def watch(self, variables: Sequence[Any]) -> None:
        """Track these variables from now on; those that are new count as changed."""
        self.variables = list(variables)
        self._seen = {id(v): seen for v in variables if (seen := self._seen.get(id(v)))}

    def forget(self) -> None:
        """Count every variable as changed."""
        self._seen = {}

    def changed(self) -> list[int]:
        """The positions of variables that differ from when they were noted."""
        return [i for i, v in enumerate(self.variables) if self._seen.get(id(v)) != _version(v)]

    def note(self) -> None:
        """All replicas have the same values now."""
        self._seen = {id(v): _version(v) for v in self.variables}


def _version(variable: Any) -> tuple[int, int, bool]:
    value = variable._value
    return id(value), value._version, bool(variable._trainable)


class _TrialGroup:
    """That of one of the replicas of a trial; see process_group.Group."""

    def __init__(self, rows: TrialRows, gathers: Gathers) -> None:
        self.rank = rows.index
        self.size = rows.num_replicas
        self.device = default_device()
        self._gathers = gathers

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.detach() * self._gathers.num_same for tensor in tensors]

    def all_reduce_flat(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.detach() * self.size

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.detach()] * self.size

    def stack(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.all_gather(tensor))

    def gather_rows(self, tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        return self._gathers.every(tensor.detach(), lambda rows, start, stop: rows[start:stop])
