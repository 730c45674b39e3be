"""JAX: one process drives all devices, the compiler splits the step (GSPMD).

State lives replicated on a mesh of the replicas' devices and each batch is laid out over it, so a
step is the one-device program with other layouts: batch norm, clipping, masked losses and dropout
masks come out as on one device. A batch that does not divide is replicated instead: every device
computes all of it, which is exact as well.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import keras
import numpy as np

from unisono.devices import Placement
from unisono.engines.batch_norm import batch_norms, group_statistics, ungroup_statistics
from unisono.engines.hooks import bind, original, unbind
from unisono.engines.interrupts import interrupts_held_back
from unisono.engines.jax_devices import adopted, ensure_cpu_devices
from unisono.engines.jax_loop import JaxLoop
from unisono.engines.jax_mesh import ReplicaMesh
from unisono.engines.jax_placement import CANNOT_LOG, device_scope, locate
from unisono.engines.parts import optimizers_of
from unisono.errors import StrategyError
from unisono.locations import Location

_STEPS = ("train_step", "test_step")
_MAKERS = ("make_train_function", "make_test_function", "make_predict_function")
_STATE = ("_make_function", "_get_jax_state", "jax_state_sync")
# The state that Keras passes through a step, told apart by its length: predict, test, train.
_PARTS = {
    2: ("trainable_variables", "non_trainable_variables"),
    3: ("trainable_variables", "non_trainable_variables", "metrics_variables"),
    4: (
        "trainable_variables",
        "non_trainable_variables",
        "optimizer_variables",
        "metrics_variables",
    ),
}


class JaxEngine:
    """Replicas as devices of one mesh."""

    backend = "jax"

    def num_gpus(self) -> int:
        return 0 if jax.default_backend() == "cpu" else jax.local_device_count()

    def prepare(self, placement: Placement) -> None:
        if placement.kind == "cpu":
            ensure_cpu_devices(max(placement.indices) + 1)

    def adopt(
        self, model: keras.Model, placement: Placement, *, sync_batch_norm: bool
    ) -> "JaxReplicas":
        return JaxReplicas(model, placement, sync_batch_norm=sync_batch_norm)

    def own_loop(self, placement: Placement) -> JaxLoop:
        return JaxLoop(placement)

    def spawn(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        placement: Placement,
    ) -> list[Any]:
        raise StrategyError(
            "Asked to spawn processes on JAX, where one process drives all devices. Call the "
            "function itself; Strategy(replicas=N) in it takes N."
        )

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
        self._model = model
        self._variables: tuple[list[Any], ...] = ()
        self._published: list[list[Any]] = []
        self._use_mesh()
        for name in _STEPS:
            bind(model, name, self._replicated_step(name))
        for name in _MAKERS:
            bind(model, name, self._maker(name))
        bind(model, "_make_function", self._make_function)
        bind(model, "_get_jax_state", self._get_state)
        bind(model, "jax_state_sync", self._sync_state)
        self._place_variables()
        self.rebuild_functions()
        adopted.add(self)

    def release(self) -> None:
        unbind(self._model, *_STEPS, *_MAKERS, *_STATE)
        for layer in batch_norms(self._model):
            ungroup_statistics(layer)
        for variable in self._own_variables():
            variable._value = jax.numpy.asarray(np.asarray(variable._value))
        self.rebuild_functions()
        adopted.discard(self)

    def rebuild_functions(self) -> None:
        """Forget compiled steps, so that the next call traces them for these devices."""
        self._model.train_function = None
        self._model.test_function = None
        self._model.predict_function = None

    def move_to_new_devices(self) -> None:
        """Take up the devices of a restarted backend under the same indices."""
        self._use_mesh()
        self._place_variables()
        self.rebuild_functions()

    def _use_mesh(self) -> None:
        self._mesh = ReplicaMesh(self.placement)

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
            logs, state = original(self._model, name)(state, data)
            # Left to itself the compiler may return a state split over the devices.
            return logs, jax.lax.with_sharding_constraint(state, self._mesh.replicated)

        return step

    def _maker(self, name: str) -> Callable[..., Any]:
        attribute = name.removeprefix("make_")

        def make(force: bool = False) -> Any:
            if getattr(self._model, attribute) is None or force:
                self._set_batch_norms()
            return original(self._model, name)(force=force)

        return make

    def _make_function(self, step: Callable[..., Any], **options: Any) -> Any:
        return original(self._model, "_make_function")(self._placed(step), **options)

    def _set_batch_norms(self) -> None:
        for layer in batch_norms(self._model):
            groups = 1 if self.sync_batch_norm else self.placement.num_replicas
            group_statistics(layer, groups)

    def _placed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(state: Any, data: Any) -> Any:
            if len(state) != len(self._variables):
                # A callback's own evaluate or predict has failed in between.
                self._list_variables(_PARTS[len(state)])
            # The variables, not `state`, are the truth: a callback may have written to a layer.
            # They are written at each step, as this one frees the values that they had before.
            before, data = self._state_of_variables(), self._mesh.place(data)
            with interrupts_held_back():
                outputs, state = step(before, data)
                self._publish(state)
            return outputs, state

        return run

    def _get_state(self, *, purge_model_variables: bool = False, **parts: bool) -> tuple[Any, ...]:
        """As Keras' own, but the values stay in the variables, where callbacks can read them."""
        self._list_variables([part for part in _PARTS[4] if parts.get(part)])
        return self._state_of_variables()

    def _sync_state(self) -> None:
        # The variables are never behind, and what a callback wrote to one must not be undone.
        self._model._jax_state_synced = True

    def _list_variables(self, parts: Sequence[str]) -> None:
        model = self._model
        lists = {
            "trainable_variables": lambda: model.trainable_variables,
            "non_trainable_variables": lambda: model.non_trainable_variables,
            "optimizer_variables": lambda: model.optimizer.variables,
            "metrics_variables": lambda: model.metrics_variables,
        }
        variables = tuple(list(lists[part]()) for part in parts)
        if [list(map(id, v)) for v in variables] != [list(map(id, v)) for v in self._variables]:
            self._variables = variables
            self._published = [[None] * len(part) for part in variables]

    def _state_of_variables(self) -> tuple[Any, ...]:
        for variables, published in zip(self._variables, self._published, strict=True):
            for i, variable in enumerate(variables):
                if variable._value is not published[i]:
                    published[i] = variable._value = jax.device_put(
                        variable._value, self._mesh.replicated
                    )
        return tuple(list(published) for published in self._published)

    def _publish(self, state: Sequence[Sequence[Any]]) -> None:
        self._published = [list(values) for values in state]
        for variables, values in zip(self._variables, self._published, strict=True):
            for variable, value in zip(variables, values, strict=True):
                variable._value = value
