"""Old names and old modules, and what provides each.

A module gets a `__getattr__` that knows its old names. It also provides names that still exist with
another meaning, so that libraries keep seeing the plain ones.
"""

import builtins
import functools
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from unisono.compat.knowledge import CHANGES, MODULES, Change
from unisono.compat.legacy import devices, training
from unisono.compat.legacy.lines import (
    announce,
    imports_by_name,
    is_asked_by_installed,
    is_asked_by_program,
    is_spelled_out,
    refuse,
)
from unisono.compat.lookup import canonical, gone_with
from unisono.imports import after_import

Provide = Callable[[Any], Any]
"""Makes the value of a name, from the plain one if there is one."""

_PROVIDERS: dict[str, Provide] = {
    "keras.utils.multi_gpu_model": lambda plain: devices.multi_gpu_model,
    "keras.losses.Reduction": lambda plain: training.Reduction,
    "keras.backend.get_value": lambda plain: training.get_value,
    "keras.backend.set_value": lambda plain: training.set_value,
    "keras.backend.set_session": lambda plain: devices.set_session,
    "keras.backend.get_session": lambda plain: devices.Session,
    "tensorflow.distribute.MirroredStrategy": lambda plain: devices.MirroredStrategy,
    "tensorflow.ConfigProto": lambda plain: devices.v1().ConfigProto,
    "tensorflow.GPUOptions": lambda plain: devices.v1().GPUOptions,
    "tensorflow.Session": lambda plain: devices.Session,
    "tensorflow.InteractiveSession": lambda plain: devices.Session,
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
"""Modules whose names are not old, but provided here because of simulated GPUs."""


def patch_when_imported() -> None:
    """Patch Keras and TensorFlow right after their import, or now; once only."""
    after_import("keras", _patch_keras)
    after_import("tensorflow", _patch_tensorflow)
    for rest in _modules_of("keras"):
        name = "tensorflow.keras" + rest
        after_import(name, functools.partial(_know_old_names, canonical="keras" + rest))


def _patch_keras(keras: Any) -> None:
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
    v1.Session = v1.InteractiveSession = devices.Session


def _modules_of(root: str) -> list[str]:
    """Modules under a root that have old names, without the root."""
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
        raise AttributeError(change.old)  # For `hasattr`.
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


_ROOTS_OF_GONE = tuple({change.old.partition(".")[0] for change in CHANGES if change.why})


def find_old_modules() -> None:
    """Make old modules importable; a second call does nothing."""
    if not any(isinstance(finder, _OldModules) for finder in sys.meta_path):
        sys.meta_path.append(_OldModules())  # Last: existing modules are found as usual.
        builtins.__import__ = _stopping_at_gone_modules(builtins.__import__)


def _stopping_at_gone_modules(plain: Callable[..., Any]) -> Callable[..., Any]:
    """An `__import__` that raises for modules without a successor.

    A finder is not enough: TensorFlow has imported its private copy of Keras, and a module that is
    already imported is not searched for.
    """

    @functools.wraps(plain)
    def find(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        if level == 0 and name.startswith(_ROOTS_OF_GONE):
            for dotted in (name, *(f"{name}.{each}" for each in fromlist or ())):
                change = gone_with(dotted)
                if change is not None and _is_refused(dotted):
                    raise refuse(change)
        return plain(name, globals, locals, fromlist, level)

    return find


def _is_refused(dotted: str) -> bool:
    is_there = dotted.startswith("horovod") and is_installed("horovod")
    return is_asked_by_program() and not is_asked_by_installed() and not is_there


class _OldModules(importlib.abc.MetaPathFinder):
    """Finds a removed module as one with the names of its successor."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        successor = MODULES.get(canonical(fullname))
        if successor is None:
            return None
        return importlib.util.spec_from_loader(fullname, _Successor(successor), is_package=True)


class _Successor(importlib.abc.Loader):
    """Loads a module whose names are looked up in another one."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        successor: Any = importlib.import_module(self._name)
        old = canonical(module.__name__)

        def find(name: str) -> Any:
            change = gone_with(f"{old}.{name}")
            if change is not None:
                raise refuse(change)
            return getattr(successor, name)

        vars(module)["__getattr__"] = find
        vars(module)["__all__"] = [name for name in dir(successor) if not name.startswith("_")]
        if imports_by_name(module.__name__):
            announce(old, f"{self._name}")


def is_installed(package: str) -> bool:
    """Whether a package is really installed."""
    return importlib.machinery.PathFinder.find_spec(package) is not None
