"""A model in one of several processes of a run: this process' own copy is one torch replica.

Every process runs Keras' own `fit` on its share of the data. Before a step the processes meet, and
what any of them changed outside of a step is taken over from the chief.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import torch

from unisono.backends.torch import cpu_layers
from unisono.backends.torch.change_tracker import Versions
from unisono.backends.torch.devices import as_tensor, generators, move_to
from unisono.backends.torch.distributed import world_group
from unisono.backends.torch.loss_check import learn_kinds
from unisono.backends.torch.model_pickle import carried_variables
from unisono.backends.torch.placement import adopted
from unisono.backends.torch.process_group import Group
from unisono.backends.torch.replica import TorchReplica, check_equal, current_replica, run_step
from unisono.data.arrays import unshared
from unisono.data.feed import Feed, Shard
from unisono.devices import Placement
from unisono.hooks import bind, original, unbind
from unisono.keras_internals import forget_torch_functions
from unisono.launch.client import current_world
from unisono.replication.checksums import names_of, own_checksums
from unisono.replication.introspection import leaf_metrics, optimizers_of, seed_states
from unisono.replication.loss_kinds import LossKinds
from unisono.replication.replication import Replication
from unisono.replication.step import SEED_STRIDE

_STEPS = ("train_step", "test_step", "predict_step")
# Large and odd, so that the streams of one replica's steps do not run into another's.
_STEP_STRIDE = 0x1E3779B97F4A7C15


class TorchWorldReplicas:
    """A model of this process that trains together with those of the others."""

    def __init__(self, model: keras.Model, placement: Placement, *, sync_batch_norm: bool) -> None:
        world = current_world()
        assert world is not None
        self.placement = placement
        self.sync_batch_norm = sync_batch_norm
        self._model = model
        self._world = world
        self.feed = Feed(world, needs_even_shards=False)
        self._versions = Versions()
        self._optimizers: Any = None
        self._is_known = False
        self._num_steps = 0
        move_to(model, placement)
        self._replication = Replication(
            model, current_replica, sync_batch_norm=sync_batch_norm, kernels=cpu_layers
        )
        self._begin_alike()
        for name in _STEPS:
            bind(model, name, self._step(name))
        bind(model, "_symbolic_build", self._build)
        bind(model, "_initialize_ddp", lambda: None)  # Keras 3.16 would reduce gradients again.
        forget_torch_functions(model)
        adopted.add(self)

    def variables(self) -> list[Any]:
        """Those that every replica has a copy of."""
        return list(carried_variables(self._model))

    def release(self) -> None:
        adopted.discard(self)
        self._replication.release()
        unbind(self._model, *_STEPS, "_symbolic_build", "_initialize_ddp")
        forget_torch_functions(self._model)

    def variable_names(self) -> list[str]:
        return names_of(self._model)

    def checksums(self) -> list[list[int]]:
        return [own_checksums(self._model)]

    # -- what Keras' trainer calls -------------------------------------------------------------

    def _build(self, iterator: Any = None, data_batch: Any = None) -> None:
        data_batch = data_batch.data if isinstance(data_batch, Shard) else data_batch
        batches = None if iterator is None else unshared(iterator)
        original(self._model, "_symbolic_build")(batches, data_batch)
        self._replication.prepare()
        self._is_known = False

    def _step(self, name: str) -> Callable[[Any], Any]:
        def step(data: Any) -> Any:
            share = self.feed.shard(data)
            own = keras.tree.map_structure(as_tensor, share.data)
            is_built = all(layer.built for layer in self._model._flatten_layers())
            if name != "predict_step" and self._replication.must_learn(name):
                self._learn_kinds(name, own)
            if name == "predict_step":
                self._is_known = False  # Keras predicts without a symbolic build before it.
                if not is_built:
                    original(self._model, name)(own)
            group = world_group()
            self._follow_chief(group, share)
            replica = TorchReplica(group, share.num_rows, is_replicated=share.is_replicated)
            with self._own_random_numbers(group):
                result = run_step(self._model, self._replication, name, own, replica)
            if not is_built:
                self._check_what_was_built(replica)
            self._versions.note()
            return result

        # A compiler would try to follow the step into sockets and processes.
        uncompiled: Callable[[Any], Any] = torch.compiler.disable(step)
        return uncompiled

    def _learn_kinds(self, name: str, own: Any) -> None:
        """Every process tries its rows, which may build layers, and all believe the chief."""
        rows = next((len(leaf) for leaf in keras.tree.flatten(own) if leaf is not None), 0)
        self._replication.prepare()
        kinds = learn_kinds(self._model, self._replication, name, own, rows)
        where = f"{self.feed.where()}, losses of {name}"
        kinds = LossKinds(**self._world.broadcast(where, dataclasses.asdict(kinds)))
        self._replication.learn(name, kinds)

    # -- staying alike -------------------------------------------------------------------------

    def _begin_alike(self) -> None:
        """Take over the chief's values, as far as the model has any yet."""
        metrics = [v for metric in leaf_metrics(self._model) for v in metric.variables]
        self._versions.watch([*carried_variables(self._model), *metrics])
        group = world_group()
        with self.feed.calling("unisono.parallel"):
            self._follow_chief_in(group, Shard(None, 0, True, 0))
        self._versions.note()

    def settle(self, when: str) -> None:
        with self.feed.calling(when):
            self._follow_chief(world_group(), Shard(None, 0, True, 0))
        self._versions.note()

    def _follow_chief(self, group: Group, share: Shard) -> None:
        optimizers = [(id(optimizer), optimizer.built) for optimizer in optimizers_of(self._model)]
        if not self._is_known or optimizers != self._optimizers:
            self._versions.watch(carried_variables(self._model))
            self._is_known, self._optimizers = True, optimizers
        self._follow_chief_in(group, share)

    def _follow_chief_in(self, group: Group, share: Shard) -> None:
        """Meet at a step, and take over what was changed since the last one."""
        places = self.feed.agree(share, self._versions.changed(), self._describe)
        if not places:
            return
        variables = self._versions.variables
        trainable = torch.tensor(self._versions.trainable(), device=group.device)
        group.broadcast([*(variables[i]._value for i in places), trainable])
        seeds = {id(state) for state in seed_states(self._model)}
        for i in places:
            if id(variables[i]) in seeds:
                # A stream of its own, so that no two replicas draw the same masks.
                variables[i]._value.data[0] += group.rank * SEED_STRIDE
        for variable, is_trainable in zip(variables, trainable.tolist(), strict=True):
            if variable._trainable != is_trainable:
                variable.trainable = is_trainable

    def _describe(self) -> list[str]:
        # Without the numbers that Keras counts up: a process may have made other models before.
        names = [re.sub(r"_[0-9]+", "", v.name) for v in self._versions.variables]
        pairs = zip(names, self._versions.variables, strict=True)
        return [f"{name} {tuple(v.shape)} {v.dtype}" for name, v in pairs]

    def _check_what_was_built(self, replica: TorchReplica) -> None:
        """Layers that a step itself has built had no chance to begin with the chief's values."""
        known = {id(variable) for variable in self._versions.variables}
        built = [v for v in carried_variables(self._model) if id(v) not in known]
        check_equal(replica, built)

    @contextmanager
    def _own_random_numbers(self, group: Group) -> Iterator[None]:
        """Let what draws from torch's own generators in a step draw other numbers on each replica.

        Outside of steps these generators stay alike: data is shuffled by them.
        """
        self._num_steps += 1
        seed = torch.initial_seed() + group.rank * SEED_STRIDE + self._num_steps * _STEP_STRIDE
        states = [(generator, generator.get_state()) for generator in generators()]
        try:
            for generator, _ in states:
                generator.manual_seed(seed % 2**63)
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)
