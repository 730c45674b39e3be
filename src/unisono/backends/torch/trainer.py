"""A model on several torch replicas of this machine: a copy in a process for each but the first.

The caller runs Keras' own `fit` and alone iterates the data and runs callbacks. At each step it
writes the other replicas' rows into shared memory, tells them what to do, and does its own rows;
all of them meet in the collectives of the step. The caller's values are the truth: what it changed
since the last step (a callback, a batch too small to split) is sent before the next one.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import keras
import torch

from unisono.backends.torch import cpu_layers
from unisono.backends.torch.change_tracker import Versions
from unisono.backends.torch.devices import as_tensor, move_to
from unisono.backends.torch.loss_check import learn_kinds
from unisono.backends.torch.model_pickle import carried_variables, pack
from unisono.backends.torch.native_optimizers import hooked
from unisono.backends.torch.placement import adopted
from unisono.backends.torch.process_group import Group
from unisono.backends.torch.replica import TorchReplica, current_replica, own_rows, run_step
from unisono.backends.torch.worker_pool import Team, is_split, threads_per_replica
from unisono.devices import Placement
from unisono.hooks import bind, original, unbind
from unisono.keras_internals import forget_torch_functions
from unisono.launch.workers import Workers
from unisono.replication.checksums import names_of, own_checksums
from unisono.replication.introspection import optimizers_of
from unisono.replication.replication import Replication

_STEPS = ("train_step", "test_step", "predict_step")
_CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_numbers = itertools.count()


class TorchReplicas:
    """A model in the calling process, with a copy in the process of every other replica."""

    def __init__(self, model: keras.Model, placement: Placement, *, sync_batch_norm: bool) -> None:
        self.placement = placement
        self.sync_batch_norm = sync_batch_norm
        self.feed = None
        self._model = model
        self._number = next(_numbers)
        self._team = Team.of(placement)
        self._sent: bytes | None = None
        self._sent_to: Workers | None = None
        self._may_differ = True
        self._key: Any = None
        self._versions = Versions()
        self._depth = 0
        move_to(model, placement)
        self._replication = Replication(
            model, current_replica, sync_batch_norm=sync_batch_norm, kernels=cpu_layers
        )
        for name in _STEPS:
            bind(model, name, self._step(name))
        for name in _CALLS:
            bind(model, name, self._call(name))
        bind(model, "_symbolic_build", self._build)
        bind(model, "_initialize_ddp", lambda: None)  # Keras 3.16 would reduce gradients again.
        forget_torch_functions(model)
        weakref.finalize(model, self._team.forget, self._number)
        adopted.add(self)

    def variables(self) -> list[Any]:
        """Those that every replica has a copy of."""
        return list(carried_variables(self._model))

    def release(self) -> None:
        adopted.discard(self)
        self._replication.release()
        unbind(self._model, *_STEPS, *_CALLS, "_symbolic_build", "_initialize_ddp")
        forget_torch_functions(self._model)
        self._team.forget(self._number)

    def settle(self, when: str) -> None:
        """Workers get what has changed before the next step."""

    def variable_names(self) -> list[str]:
        return names_of(self._model)

    def checksums(self) -> list[list[int]]:
        own = own_checksums(self._model)
        if self._sent is None:
            return [own]  # The others get their copies at the first step.
        group = self._team.start()
        self._send_changes(group)
        self._team.tell("checksums", self._number)
        return [one.tolist() for one in group.all_gather(torch.tensor(own, device=group.device))]

    # -- what Keras' trainer calls -------------------------------------------------------------

    def _call(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Anything on the model may have been changed since the last call.
            is_outermost = self._depth == 0 and name in ("fit", "evaluate", "predict")
            self._may_differ = self._may_differ or is_outermost
            threads = torch.get_num_threads()
            self._depth += 1
            try:
                if self.placement.kind == "cpu":
                    torch.set_num_threads(threads_per_replica(self.placement.num_replicas))
                return original(self._model, name)(*args, **kwargs)
            finally:
                self._depth -= 1
                torch.set_num_threads(threads)

        return call

    def _build(self, *args: Any, **kwargs: Any) -> None:
        original(self._model, "_symbolic_build")(*args, **kwargs)
        self._replication.prepare()

    def _step(self, name: str) -> Callable[[Any], Any]:
        alone = original(self._model, name)

        def step(data: Any) -> Any:
            data = keras.tree.map_structure(as_tensor, data)
            num_rows = _num_rows(data)
            # Too few rows for all, or a model that its first call builds: what this replica does
            # alone is exact, and what it changes is sent before the next step.
            if num_rows < self.placement.num_replicas or not self._is_built():
                return alone(data)
            try:
                return self._step_with_others(name, data, num_rows)
            except BaseException as error:
                raise self._team.explain(error) from error.__cause__

        # A compiler would try to follow the step into sockets and processes.
        uncompiled: Callable[[Any], Any] = torch.compiler.disable(step)
        return uncompiled

    def _is_built(self) -> bool:
        return self._sent is not None or all(layer.built for layer in self._model._flatten_layers())

    def _step_with_others(self, name: str, data: Any, num_rows: int) -> Any:
        group = self._team.start()
        if name != "predict_step" and self._replication.must_learn(name):
            self._replication.prepare()
            with hooked():
                kinds = learn_kinds(self._model, self._replication, name, data, num_rows)
            self._replication.learn(name, kinds)
        self._send_changes(group)
        layout = self._team.share(data, num_rows)
        kinds_of_step = self._replication.kinds(name)
        training = self._model.training
        self._team.tell("step", self._number, name, layout, num_rows, training, kinds_of_step)
        rows = own_rows(num_rows, group)
        own = keras.tree.map_structure(lambda leaf: _rows(leaf, rows, num_rows), data)
        replica = TorchReplica(group, num_rows)
        with hooked():
            result = run_step(self._model, self._replication, name, own, replica)
        self._versions.note()
        return result

    # -- keeping the others up to date ---------------------------------------------------------

    def _send_changes(self, group: Group) -> None:
        model = self._model
        optimizers = list(optimizers_of(model))  # Empty until it is compiled.
        parts = (*optimizers, model._compile_loss, model._compile_metrics)
        is_built = all(optimizer.built for optimizer in optimizers)
        key = (self._team.workers, is_built, *(id(part) for part in parts))
        if self._may_differ or key != self._key:
            self._send_model()
            self._key, self._may_differ = key, False
        places = self._versions.changed()
        if places:
            trainable = self._versions.trainable()
            self._team.tell("values", self._number, places, trainable)
            group.broadcast([self._versions.variables[i]._value for i in places])

    def _send_model(self) -> None:
        self._replication.prepare()
        data = pack(self._model)
        self._versions.watch(carried_variables(self._model))
        if data == self._sent and self._sent_to is self._team.workers:
            return
        seed = torch.initial_seed() % 2**31
        self._team.tell("model", self._number, data, self.sync_batch_norm, seed)
        self._sent, self._sent_to = data, self._team.workers
        self._versions.forget()


def _rows(leaf: Any, rows: slice, num_rows: int) -> Any:
    return leaf[rows] if leaf is not None and is_split(leaf, num_rows) else leaf


def _num_rows(data: Any) -> int:
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None and leaf.ndim]
    return len(leaves[0]) if leaves else 0
