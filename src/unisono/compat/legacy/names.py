"""Old names of modules that are still there, and which part of this room provides each.

A module gets a `__getattr__` that knows its old names. Names that still exist and mean something
else to an old program are answered by it too, so that libraries go on seeing the plain ones.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from unisono.compat.knowledge import CHANGES, MODULES, Change
from unisono.compat.legacy import devices, optimizers, sessions, strategies, training
from unisono.compat.legacy.lines import announce, is_asked_by_program, is_spelled_out, refuse
from unisono.imports import after_import

Provide = Callable[[Any], Any]
"""What gives a name its meaning, from the plain one if there is one."""

_PROVIDERS: dict[str, Provide] = {
    "keras.utils.multi_gpu_model": lambda plain: strategies.multi_gpu_model,
    "keras.losses.Reduction": lambda plain: training.Reduction,
    "keras.backend.get_value": lambda plain: optimizers.get_value,
    "keras.backend.set_value": lambda plain: optimizers.set_value,
    "keras.backend.set_session": lambda plain: sessions.set_session,
    "keras.backend.get_session": lambda plain: sessions.Session,
    "tensorflow.distribute.MirroredStrategy": lambda plain: strategies.MirroredStrategy,
    "tensorflow.ConfigProto": lambda plain: sessions.v1().ConfigProto,
    "tensorflow.GPUOptions": lambda plain: sessions.v1().GPUOptions,
    "tensorflow.Session": lambda plain: sessions.Session,
    "tensorflow.InteractiveSession": lambda plain: sessions.Session,
}
for _home in ("tensorflow.config.", "tensorflow.config.experimental."):
    _PROVIDERS |= {
        f"{_home}list_physical_devices": devices.list_devices_with,
        f"{_home}get_visible_devices": devices.list_devices_with,
        f"{_home}set_visible_devices": devices.set_visible_devices_with,
        f"{_home}set_memory_growth": lambda plain: devices.set_memory_growth,
    }
_PROVIDERS |= {
    "tensorflow.config.set_logical_device_configuration": devices.divide_with,
    "tensorflow.config.experimental.set_virtual_device_configuration": devices.divide_with,
}
_STILL_THERE = ("tensorflow.config",)
"""Modules whose names are not old; they are answered here because of simulated GPUs."""


def patch_when_imported() -> None:
    """Patch Keras and TensorFlow right after their import, or now; once only."""
    after_import("keras", _patch_keras)
    after_import("tensorflow", _patch_tensorflow)
    for rest in _modules_of("keras"):
        name = "tensorflow.keras" + rest
        after_import(name, functools.partial(_know_old_names, canonical="keras" + rest))


def _patch_keras(keras: Any) -> None:
    optimizers.patch(keras)
    training.patch(keras)
    for home in ("keras", "keras._tf_keras.keras"):
        for rest in _modules_of("keras"):
            module = sys.modules.get(home + rest)
            if module is not None:
                _know_old_names(module, canonical="keras" + rest)


def _patch_tensorflow(tensorflow: Any) -> None:
    for rest in _modules_of("tensorflow"):
        module = functools.reduce(getattr, rest.split(".")[1:], tensorflow)
        _know_old_names(module, canonical="tensorflow" + rest)
    v1 = tensorflow.compat.v1
    v1.Session = v1.InteractiveSession = sessions.Session


def _modules_of(root: str) -> list[str]:
    """Modules under a root whose old names are known, as what follows the root."""
    found = {change.module for change in CHANGES if change.why is None}
    found |= {old.rpartition(".")[0] for old in MODULES}
    found |= {change.module for change in CHANGES if change.why and change.module == root}
    inner = {name for name in found if name not in MODULES and not name.endswith(".Reduction")}
    return sorted(
        name.removeprefix(root) for name in inner if name == root or name.startswith(root + ".")
    )


def _know_old_names(module: Any, *, canonical: str) -> None:
    names = vars(module)
    if "_unisono_legacy" in names:
        return
    changes = {change.name: change for change in CHANGES if change.module == canonical}
    plain = {
        name: names.pop(name)
        for name, change in changes.items()
        if name in names and change.old in _PROVIDERS
    }
    ask_module = names.get("__getattr__")

    def find(name: str) -> Any:
        if name in plain and not is_asked_by_program():
            return plain[name]
        if name in changes and is_asked_by_program():
            return _provide(changes[name], plain.get(name))
        if f"{canonical}.{name}" in MODULES and not name.startswith("_"):
            return importlib.import_module(f"{module.__name__}.{name}")
        if ask_module is not None:
            return ask_module(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    names["_unisono_legacy"] = True
    names["__getattr__"] = find


def _provide(change: Change, plain: Any) -> Any:
    if change.why is not None:
        if is_spelled_out():
            raise refuse(change)
        raise AttributeError(change.old)  # `hasattr` is told the truth.
    if change.module not in _STILL_THERE:
        announce(change.old, change.write)
    if change.old in _PROVIDERS:
        return _PROVIDERS[change.old](plain)
    assert change.new is not None
    return _resolve(change.new)


def _resolve(dotted: str) -> Any:
    module, _, name = dotted.rpartition(".")
    if module == "tensorflow" or not module.startswith("tensorflow"):
        return getattr(importlib.import_module(module), name)
    value: Any = importlib.import_module("tensorflow")
    for part in dotted.split(".")[1:]:
        value = getattr(value, part)
    return value
