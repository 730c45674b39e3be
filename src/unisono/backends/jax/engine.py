"""JAX: one process drives all devices, the compiler splits the step (GSPMD).

State lives replicated on a mesh of the replicas' devices and each batch is laid out over it, so a
step is the one-device program with other layouts: batch norm, clipping, masked losses and dropout
masks come out as on one device. A batch that does not divide is replicated instead: every device
computes all of it, which is exact as well.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import keras
import numpy as np

from unisono.backends.jax.batch_norm import tracing_step
from unisono.backends.jax.collectives import JaxCollectives
from unisono.backends.jax.custom_loop import JaxLoop
from unisono.backends.jax.devices import adopted, ensure_cpu_devices
from unisono.backends.jax.functions import bind_makers, rebuild_functions, unbind_makers
from unisono.backends.jax.mesh import ReplicaMesh
from unisono.backends.jax.multi_process import JaxWorldReplicas
from unisono.backends.jax.multi_process_loop import JaxWorldLoop
from unisono.backends.jax.placement import CANNOT_LOG, device_scope, locate
from unisono.backends.jax.state import KnownValues, StepState
from unisono.backends.jax.throttle import await_turn, note_step
from unisono.devices import Placement
from unisono.devices.locations import Location
from unisono.hooks import bind, original, unbind
from unisono.keras_internals import jax_function, jax_step
from unisono.replication.checksums import checksum, compared_variables, names_of
from unisono.replication.interrupts import interrupts_held_back
from unisono.replication.introspection import optimizers_of

_STEPS = ("train_step", "test_step")
_STATE = ("_make_function", "_get_jax_state", "jax_state_sync", "state_sync")


class JaxBackend:
    """Replicas as devices of one mesh."""

    backend = "jax"

    def num_gpus(self) -> int:
        return 0 if jax.default_backend() == "cpu" else jax.local_device_count()

    def prepare(self, placement: Placement) -> None:
        if placement.kind == "cpu" and placement.num_processes == 1:
            ensure_cpu_devices(max(placement.indices) + 1)

    def replicate(
        self, model: keras.Model, placement: Placement, *, sync_batch_norm: bool
    ) -> "JaxReplicas | JaxWorldReplicas":
        if placement.num_processes > 1:
            return JaxWorldReplicas(model, placement, sync_batch_norm=sync_batch_norm)
        return JaxReplicas(model, placement, sync_batch_norm=sync_batch_norm)

    def custom_loop(self, placement: Placement) -> JaxLoop | JaxWorldLoop:
        return JaxLoop(placement) if placement.num_processes == 1 else JaxWorldLoop(placement)

    def collectives(self, ranks: Sequence[int] | None = None) -> JaxCollectives:
        return JaxCollectives(ranks)

    def device_scope(self, placement: Placement) -> AbstractContextManager[None]:
        return device_scope(placement)

    def locate(self, values: Sequence[Any]) -> list[Location | None]:
        return [locate(value) for value in values]

    def log_placement(self, is_on: bool) -> str | None:
        return CANNOT_LOG


class JaxReplicas:
    """A model whose state is replicated over a mesh and whose batches are split over it."""

    def __init__(self, model: keras.Model, placement: Placement, *, sync_batch_norm: bool) -> None:
        self.placement = placement
        self.sync_batch_norm = sync_batch_norm
        self.feed = None
        self._model = model
        self._use_mesh()
        steps = {name: functools.partial(self._replicated_step, name) for name in _STEPS}
        bind_makers(model, placement, lambda: self._mesh, steps, sync_batch_norm=sync_batch_norm)
        bind(model, "_make_function", self._make_function)
        bind(model, "_get_jax_state", lambda **parts: self._state.get(**parts))
        for name in ("jax_state_sync", "state_sync"):  # The other name since Keras 3.16.
            bind(model, name, lambda: self._state.sync())
        self._place_variables()
        rebuild_functions(self._model)
        adopted.add(self)

    def release(self) -> None:
        unbind(self._model, *_STEPS, *_STATE)
        unbind_makers(self._model)
        for variable in self._own_variables():
            variable._value = jax.numpy.asarray(np.asarray(variable._value))
        rebuild_functions(self._model)
        adopted.discard(self)

    def settle(self, when: str) -> None:
        """All replicas are in this process."""

    def variable_names(self) -> list[str]:
        return names_of(self._model)

    def checksums(self) -> list[list[int]]:
        variables = compared_variables(self._model)
        shards = [variable._value.addressable_shards for variable in variables]
        count = self.placement.num_replicas
        # A value that was just assigned lies on one device, until the next step.
        return [[checksum(parts[r % len(parts)].data) for parts in shards] for r in range(count)]

    def move_to_new_devices(self) -> None:
        """Take up the devices of a restarted backend under the same indices."""
        self._use_mesh()
        self._place_variables()
        rebuild_functions(self._model)

    def _use_mesh(self) -> None:
        self._mesh = ReplicaMesh(self.placement)
        self._state = StepState(self._model, self._mesh, KnownValues())

    def _place_variables(self) -> None:
        """Show from the start where the values live; a step would move them anyway."""
        for variable in self._own_variables():
            if variable._value is not None:
                variable._value = jax.device_put(variable._value, self._mesh.replicated)

    def _own_variables(self) -> list[Any]:
        variables = list(self._model.variables)
        variables += self._model.metrics_variables if self._model.compiled else []
        for optimizer in optimizers_of(self._model):
            variables += optimizer.variables
        return variables

    # -- what Keras' trainer calls -------------------------------------------------------------

    def _replicated_step(self, name: str) -> Callable[..., Any]:
        def step(state: Any, data: Any) -> Any:
            with tracing_step():
                logs, state = original(self._model, name)(state, data)
            # Left to itself the compiler may return a state split over the devices.
            return logs, jax.lax.with_sharding_constraint(state, self._mesh.replicated)

        return step

    def _make_function(self, step: Callable[..., Any], **options: Any) -> Any:
        run = self._placed(jax_step(self._model, step))
        return jax_function(self._model, run, **options)

    def _placed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(state: Any, data: Any) -> Any:
            # The variables, not `state`, are the truth: a callback may have written to a layer.
            # They are written at each step, as this one frees the values that they had before.
            if self.placement.kind == "cpu":
                await_turn()
            self._state.list_like(state)
            before, data = self._state.take(), self._mesh.place(data)
            with interrupts_held_back():
                outputs, state = step(before, data)
                self._state.publish(state)
            if self.placement.kind == "cpu":
                note_step(outputs, state)
            return outputs, state

        return run
