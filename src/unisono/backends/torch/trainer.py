"""A model that trains on several torch replicas, of which this process is one.

Keras' own `fit` runs in this process. Each step takes this replica's rows, brings the replicas to
the same values, and runs the class's own step, whose collectives are in the hooks on the model.
Where rows and changed values come from is up to the peers: worker processes that this process feeds
(worker_pool.WorkerPeers), or the other processes of a run (RunPeers), each of which runs `fit`.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import keras
import torch

from unisono.backends.torch.batches import on_host, sharded_loader, to_device
from unisono.backends.torch.cpu_layers import chosen_layers
from unisono.backends.torch.devices import generators, move_to, replicated
from unisono.backends.torch.model_copy import ModelCopy
from unisono.backends.torch.model_pickle import replicated_variables
from unisono.backends.torch.process_group import Group, world_group
from unisono.backends.torch.replica import TorchReplica, check_equal
from unisono.backends.torch.worker_pool import WorkerPeers
from unisono.data.arrays import without_shards
from unisono.data.feed import Feed, Shard
from unisono.devices import Placement
from unisono.hooks import bind, original, unbind
from unisono.keras_internals import forget_torch_functions
from unisono.launch.client import current_world
from unisono.replication.checksums import names_of, own_checksums
from unisono.replication.exact_draws import is_exact
from unisono.replication.introspection import leaf_metrics, optimizers_of
from unisono.replication.loss_kinds import LossKinds
from unisono.replication.random_state import SEED_STRIDE

_STEPS = ("train_step", "test_step", "predict_step")
# Large and odd, so that the streams of one replica's steps do not run into another's.
_STEP_STRIDE = 0x1E3779B97F4A7C15
_NO_ROWS = Shard(None, 0, True, 0)


class Peers(Protocol):
    """The other replicas of a model, as its trainer uses them."""

    @property
    def feed(self) -> Feed | None:
        """Splits the data of a process of a run; None where all data is in this process."""

    def shard(self, data: Any) -> Shard:
        """A batch as tensors on the host: this process' rows, or all where this process splits it.

        Tensors that a program has put on a GPU stay there.
        """

    def can_join(self, shard: Shard) -> bool:
        """Whether the replicas run a step on these rows together; otherwise this one does alone."""

    def agree_on_kinds(self, name: str, kinds: LossKinds) -> LossKinds:
        """The kinds of a step's losses that all replicas use, from what this one has found."""

    def step(self, name: str, shard: Shard) -> AbstractContextManager[tuple[Any, TorchReplica]]:
        """A step that all replicas run with the same values; gives this replica's rows."""

    def settle(self, when: str) -> None:
        """Bring all replicas to the same values outside of a step; a collective."""

    def was_built(self) -> None:
        """Keras has just made the variables of a compiled model."""

    def checksums(self) -> list[list[int]]:
        """Of the replicas that this process has started, itself first."""

    def release(self) -> None:
        """The model is on replicas no more."""


class TorchTrainer:
    """See base.ReplicatedModel."""

    def __init__(self, model: keras.Model, placement: Placement, *, sync_batch_norm: bool) -> None:
        self.placement = placement
        self.sync_batch_norm = sync_batch_norm
        self._model = model
        move_to(model, placement)
        is_run = placement.num_processes > 1
        layers = chosen_layers(placement) if is_run else None
        self._copy = ModelCopy(model, sync_batch_norm=sync_batch_norm, kernels=layers)
        self._peers: Peers = RunPeers(self._copy) if is_run else WorkerPeers(self._copy, placement)
        self.feed = self._peers.feed
        for name in _STEPS:
            bind(model, name, self._step(name))
        bind(model, "_symbolic_build", self._build)
        bind(model, "_initialize_ddp", lambda: None)  # Keras 3.16 would reduce gradients again.
        forget_torch_functions(model)
        replicated.add(self)

    def variables(self) -> list[Any]:
        """Those that every replica has a copy of."""
        return list(replicated_variables(self._model))

    def release(self) -> None:
        replicated.discard(self)
        self._copy.replication.release()
        self._copy.buckets.clear()
        unbind(self._model, *_STEPS, "_symbolic_build", "_initialize_ddp")
        forget_torch_functions(self._model)
        self._peers.release()

    def settle(self, when: str) -> None:
        """Bring all replicas to the same values where no step follows."""
        self._peers.settle(when)

    def variable_names(self) -> list[str]:
        return names_of(self._model)

    def checksums(self) -> list[list[int]]:
        return self._peers.checksums()

    # -- what Keras' trainer calls -------------------------------------------------------------

    def _build(self, iterator: Any = None, data_batch: Any = None) -> None:
        data_batch = data_batch.data if isinstance(data_batch, Shard) else data_batch
        batches = iterator if iterator is None or self.feed is None else without_shards(iterator)
        original(self._model, "_symbolic_build")(batches, data_batch)
        self._copy.replication.prepare()
        self._peers.was_built()

    def _step(self, name: str) -> Callable[[Any], Any]:
        alone = original(self._model, name)
        replication = self._copy.replication

        def step(data: Any) -> Any:
            shard = self._peers.shard(data)
            if not self._peers.can_join(shard):
                return alone(keras.tree.map_structure(to_device, shard.data))
            if name != "predict_step" and replication.must_learn(name):
                kinds = self._copy.find_kinds(name, shard.data)
                replication.learn(name, self._peers.agree_on_kinds(name, kinds))
            with self._peers.step(name, shard) as (rows, replica):
                result = self._copy.run_step(name, rows, replica)
            self._copy.changes.note()
            return result

        # A compiler would try to follow the step into sockets and processes.
        uncompiled: Callable[[Any], Any] = torch.compiler.disable(step)
        return uncompiled


class RunPeers:
    """The other processes of a run, which all run the same program on their shard of the data.

    Before each step the processes agree on it, and what any of them changed outside of a step is
    taken over from the chief.
    """

    def __init__(self, copy: ModelCopy) -> None:
        world = current_world()
        assert world is not None
        self._world = world
        self.feed = Feed(world, needs_even_shards=False, batches_of=sharded_loader)
        self._copy = copy
        self._optimizers: Any = None
        self._is_known = False
        self._was_built = True
        self._num_steps = 0
        # Start from the chief's values, as far as the model has any yet.
        metrics = [v for metric in leaf_metrics(copy.model) for v in metric.variables]
        copy.changes.watch([*replicated_variables(copy.model), *metrics])
        self._follow_outside_steps("unisono.parallel")

    def shard(self, data: Any) -> Shard:
        self._was_built = self._copy.is_built
        shard = self.feed.shard(data)
        return shard._replace(data=keras.tree.map_structure(on_host, shard.data))

    def can_join(self, shard: Shard) -> bool:
        return True

    def agree_on_kinds(self, name: str, kinds: LossKinds) -> LossKinds:
        # Each process has tried its own rows, which may build layers; the chief's result counts.
        where = f"{self.feed.where()}, losses of {name}"
        return LossKinds(**self._world.broadcast(where, dataclasses.asdict(kinds)))

    @contextmanager
    def step(self, name: str, shard: Shard) -> Iterator[tuple[Any, TorchReplica]]:
        rows = keras.tree.map_structure(to_device, shard.data)
        if name == "predict_step":
            self._is_known = False  # Keras predicts without a symbolic build before it.
            if not self._was_built:
                original(self._copy.model, name)(rows)
        group = world_group()
        self._watch_new_variables()
        self._follow_chief(group, shard)
        replica = TorchReplica(group, shard.num_rows, is_replicated=shard.is_replicated)
        with self._random_numbers_of_replica(group):
            yield rows, replica
        if not self._was_built:
            self._check_new_variables(replica)

    def settle(self, when: str) -> None:
        self._watch_new_variables()
        self._follow_outside_steps(when)

    def was_built(self) -> None:
        self._is_known = False

    def checksums(self) -> list[list[int]]:
        return [own_checksums(self._copy.model)]

    def release(self) -> None:
        """The other processes release theirs."""

    def _watch_new_variables(self) -> None:
        model = self._copy.model
        optimizers = [(id(optimizer), optimizer.built) for optimizer in optimizers_of(model)]
        if not self._is_known or optimizers != self._optimizers:
            self._copy.changes.watch(replicated_variables(model))
            self._is_known, self._optimizers = True, optimizers

    def _follow_outside_steps(self, when: str) -> None:
        with self.feed.calling(when):
            self._follow_chief(world_group(), _NO_ROWS)
        self._copy.changes.note()

    def _follow_chief(self, group: Group, shard: Shard) -> None:
        """Agree on a step, and take over what was changed since the last one."""
        places = self.feed.agree(shard, self._copy.changes.changed(), self._describe)
        if places:
            self._copy.follow_first(group, places)

    def _describe(self) -> list[str]:
        # Without the numbers that Keras counts up: a process may have made other models before.
        variables = self._copy.changes.variables
        names = [re.sub(r"_[0-9]+", "", variable.name) for variable in variables]
        pairs = zip(names, variables, strict=True)
        return [f"{name} {tuple(v.shape)} {v.dtype}" for name, v in pairs]

    def _check_new_variables(self, replica: TorchReplica) -> None:
        """Layers that a step itself has built did not start with the chief's values."""
        known = {id(variable) for variable in self._copy.changes.variables}
        built = [v for v in replicated_variables(self._copy.model) if id(v) not in known]
        check_equal(replica, built)

    @contextmanager
    def _random_numbers_of_replica(self, group: Group) -> Iterator[None]:
        """Let each replica draw other numbers from torch's default generators during a step.

        Outside of steps these generators stay the same on all: they shuffle the data.
        """
        if is_exact():
            yield
            return
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
