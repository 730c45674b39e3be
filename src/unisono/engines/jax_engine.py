"""JAX: one process drives all devices, the compiler splits the step (GSPMD).

State lives replicated on a mesh of the replicas' devices and each batch is laid out over it, so a
step is the one-device program with other layouts: batch norm, clipping, masked losses and dropout
masks come out as on one device. A batch that does not divide is replicated instead: every device
computes all of it, which is exact as well.
"""

import gc
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.backend
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unisono.devices import Placement
from unisono.engines.batch_norm import batch_norms, group_statistics, ungroup_statistics
from unisono.engines.hooks import bind, original, unbind
from unisono.engines.interrupts import interrupts_held_back
from unisono.engines.jax_settings import has_started
from unisono.engines.replication import optimizers_of
from unisono.errors import StartedError

_AXIS = "replica"
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
_adopted: "weakref.WeakSet[JaxReplicas]" = weakref.WeakSet()
_num_cpu_devices_set_by_us = 0


class JaxEngine:
    """Replicas as devices of one mesh."""

    backend = "jax"

    def num_gpus(self) -> int:
        return 0 if jax.default_backend() == "cpu" else jax.local_device_count()

    def prepare(self, placement: Placement) -> None:
        if placement.kind == "cpu":
            _ensure_cpu_devices(max(placement.indices) + 1)

    def adopt(
        self, model: keras.Model, placement: Placement, *, sync_batch_norm: bool
    ) -> "JaxReplicas":
        return JaxReplicas(model, placement, sync_batch_norm=sync_batch_norm)


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
        self.rebuild_functions()
        _adopted.add(self)

    def release(self) -> None:
        unbind(self._model, *_STEPS, *_MAKERS, *_STATE)
        for layer in batch_norms(self._model):
            ungroup_statistics(layer)
        for variable in self._own_variables():
            variable._value = jax.numpy.asarray(np.asarray(variable._value))
        self.rebuild_functions()
        _adopted.discard(self)

    def rebuild_functions(self) -> None:
        """Forget compiled steps, so that the next call traces them for these devices."""
        self._model.train_function = None
        self._model.test_function = None
        self._model.predict_function = None

    def move_to_new_devices(self) -> None:
        """Take up the devices of a restarted backend under the same indices."""
        self._use_mesh()
        self.rebuild_functions()

    def _use_mesh(self) -> None:
        every = jax.devices() if self.placement.kind == "gpu" else jax.devices("cpu")
        mesh = Mesh(np.array([every[i] for i in self.placement.indices]), (_AXIS,))
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._split = NamedSharding(mesh, PartitionSpec(_AXIS))

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
            return logs, jax.lax.with_sharding_constraint(state, self._replicated)

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
            before, data = self._state_of_variables(), self._place(data)
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
                        variable._value, self._replicated
                    )
        return tuple(list(published) for published in self._published)

    def _publish(self, state: Sequence[Sequence[Any]]) -> None:
        self._published = [list(values) for values in state]
        for variables, values in zip(self._variables, self._published, strict=True):
            for variable, value in zip(variables, values, strict=True):
                variable._value = value

    def _place(self, batch: Any) -> Any:
        leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
        num_rows = next((leaf.shape[0] for leaf in leaves if len(leaf.shape)), 0)
        is_even = num_rows % self.placement.num_replicas == 0

        def put(leaf: Any) -> Any:
            if leaf is None:
                return None
            is_split = is_even and isinstance(leaf, (np.ndarray, jax.Array))
            is_split = is_split and leaf.ndim > 0 and leaf.shape[0] == num_rows
            return jax.device_put(leaf, self._split if is_split else self._replicated)

        return keras.tree.map_structure(put, batch)


def _ensure_cpu_devices(count: int) -> None:
    """Have at least `count` virtual CPU devices, restarting JAX's backends if need be."""
    global _num_cpu_devices_set_by_us
    if not has_started():
        _refuse_if_fixed(count)
        if count > 1:
            jax.config.update("jax_num_cpu_devices", count)
            _num_cpu_devices_set_by_us = count
        return
    found = len(jax.devices("cpu"))
    if found >= count:
        return
    _refuse_if_fixed(count)
    if jax.default_backend() != "cpu":
        raise StartedError(
            f"Asked for {count} CPU replicas; JAX has started on {jax.default_backend()} with "
            f"{found} CPU device(s). Call unisono.parallel before building a model, or train on "
            "the accelerator."
        )
    _restart_cpu_backend(count)
    _num_cpu_devices_set_by_us = count


def _refuse_if_fixed(count: int) -> None:
    fixed = jax.config.jax_num_cpu_devices
    if fixed > 0 and fixed != _num_cpu_devices_set_by_us and fixed < count:
        raise StartedError(
            f"Asked for {count} CPU replicas; this program set jax_num_cpu_devices to {fixed}. "
            f"Set it to {count} or more, or remove that line and let unisono choose."
        )
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        found = len(jax.devices("cpu"))
        if found < count:
            raise StartedError(
                f"Asked for {count} CPU replicas; XLA_FLAGS fixes JAX to {found} CPU device(s). "
                f"Set --xla_force_host_platform_device_count={count}, or remove it from XLA_FLAGS."
            )


def _restart_cpu_backend(count: int) -> None:
    """Start JAX's CPU backend again with more devices and move every Keras variable over.

    Arrays that the user holds stay valid (they keep the old backend alive), but cannot be mixed
    with new ones in one operation if they were committed to a device.
    """
    variables = [v for v in _live_variables() if v._value is not None]
    values = [np.asarray(v._value) for v in variables]
    jax.extend.backend.clear_backends()
    jax.config.update("jax_num_cpu_devices", count)
    for variable, value in zip(variables, values, strict=True):
        variable._value = jax.numpy.asarray(value)
    for replicas in list(_adopted):
        replicas.move_to_new_devices()


def _live_variables() -> list[Any]:
    # Layers, optimizers, metrics and seed generators of every model, adopted or not: there is no
    # register of them, and a variable left behind would fail at its next use.
    return [o for o in gc.get_objects() if issubclass(type(o), keras.Variable)]
