"""JAX's devices: those of a placement, and more virtual CPU devices than JAX started with."""

import gc
import os
import weakref
from typing import Any, Protocol

import jax
import jax.extend.backend
import keras
import numpy as np

from unisono.backends.jax.internals import has_started
from unisono.devices import Placement
from unisono.errors import StartedError


class _Movable(Protocol):
    def move_to_new_devices(self) -> None:
        """Use the devices of a restarted JAX backend under the same indices."""


trainers: "weakref.WeakSet[_Movable]" = weakref.WeakSet()
_num_cpu_devices_set_by_us = 0


def devices_of(placement: Placement) -> list[Any]:
    """This process' devices of a placement."""
    every = jax.local_devices(backend=None if placement.kind == "gpu" else "cpu")
    return [every[i] for i in placement.indices]


def ensure_cpu_devices(count: int) -> None:
    """Have at least `count` virtual CPU devices, restarting JAX's CPU backend if need be.

    Raises:
        StartedError: The program or an accelerator has fixed the number of CPU devices.
    """
    global _num_cpu_devices_set_by_us
    if not has_started():
        _refuse_if_fixed(count)
        if count > 1:
            jax.config.update("jax_num_cpu_devices", count)
            _num_cpu_devices_set_by_us = count
        return
    found = len(jax.local_devices(backend="cpu"))
    if found >= count:
        return
    _refuse_if_fixed(count)
    if jax.process_count() > 1:
        raise StartedError(
            f"Asked for {count} CPU devices in a run of {jax.process_count()} processes, each of "
            f"which has {found}. Set jax_num_cpu_devices to {count} before JAX starts, or use the "
            "ones there are."
        )
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
        found = len(jax.local_devices(backend="cpu"))
        if found < count:
            raise StartedError(
                f"Asked for {count} CPU replicas; XLA_FLAGS fixes JAX to {found} CPU device(s). "
                f"Set --xla_force_host_platform_device_count={count}, or remove it from XLA_FLAGS."
            )


def _restart_cpu_backend(count: int) -> None:
    """Restart JAX's CPU backend with more devices and move every Keras variable to it.

    Arrays that the user holds stay valid (they keep the old backend alive), but cannot be used with
    new ones in one operation if they were committed to a device.
    """
    from unisono.backends.jax.throttle import forget_steps

    variables = [v for v in _live_variables() if v._value is not None]
    values = [(np.asarray(v._value), min(d.id for d in v._value.devices())) for v in variables]
    forget_steps()
    jax.extend.backend.clear_backends()
    jax.config.update("jax_num_cpu_devices", count)
    for variable, (value, index) in zip(variables, values, strict=True):
        # A default device keeps the value uncommitted, free to be used with those of others.
        with jax.default_device(jax.local_devices(backend="cpu")[index]):
            variable._value = jax.numpy.asarray(value)
    for trainer in list(trainers):
        trainer.move_to_new_devices()


def _live_variables() -> list[Any]:
    """Those of layers, optimizers, metrics and seed generators of every model.

    There is no register of them, and a variable left behind would fail at its next use.
    """
    return [o for o in gc.get_objects() if issubclass(type(o), keras.Variable)]
