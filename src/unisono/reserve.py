"""Reserve virtual CPU devices before TensorFlow starts, for CPU replicas asked for later.

TensorFlow fixes its devices when it starts, and building a model starts it, while users build
first and call `parallel` after. So `import unisono` sets the number where TensorFlow is imported
but has not started, or right after it is imported. No framework is imported here, no name is
patched, and nothing happens where a GPU is visible or another Keras backend is chosen.
"""

import importlib.abc
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from unisono import devices

_RESERVED_CPUS = 8


def reserve() -> None:
    """Arrange for TensorFlow to offer virtual CPU devices, now or when it is imported."""
    if _keras_backend() != "tensorflow" or (devices.num_gpus() and not devices.simulated_gpus()):
        return
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        sys.meta_path.insert(0, _AfterImport("tensorflow"))
    elif hasattr(tensorflow, "config"):
        _configure(tensorflow)


def num_reserved() -> int:
    """How many CPU devices are set aside: enough for what the environment announces."""
    # One more than simulated GPUs: the CPU itself, for placement by hand.
    return max(_RESERVED_CPUS, devices.default_replicas() or 0, devices.simulated_gpus() + 1)


def _configure(tensorflow: Any) -> None:
    if tensorflow.config.list_physical_devices("GPU") and not devices.simulated_gpus():
        return
    cpu = tensorflow.config.list_physical_devices("CPU")[0]
    if tensorflow.config.get_logical_device_configuration(cpu) not in (None, []):
        return  # The program has chosen for itself.
    configuration = tensorflow.config.LogicalDeviceConfiguration()
    try:
        tensorflow.config.set_logical_device_configuration(cpu, [configuration] * num_reserved())
    except RuntimeError:
        return  # Already started: the engine says so if CPU replicas are ever asked for.


def _keras_backend() -> str:
    """The backend that Keras uses or will use, by Keras' own rules."""
    keras = sys.modules.get("keras")
    if keras is not None and hasattr(keras, "backend"):
        return str(keras.backend.backend())
    if os.environ.get("KERAS_BACKEND"):
        return os.environ["KERAS_BACKEND"]
    home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
    try:
        return str(json.loads((home / "keras.json").read_text()).get("backend", "tensorflow"))
    except (OSError, ValueError, AttributeError):
        return "tensorflow"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs `_configure` once, right after a module has been imported."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        # Being asked is not yet an import: programs look whether TensorFlow is there.
        place = sys.meta_path.index(self)
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(place, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenConfigure(spec.loader, self)
        return spec


class _ThenConfigure(importlib.abc.Loader):
    """A module's own loader, followed by `_configure`."""

    def __init__(self, loader: Any, finder: _AfterImport) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self._finder)
        # The module must look, to itself too, as if its own loader did all of it.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        # Asked again: the program may have chosen a backend since `import unisono`.
        if _keras_backend() == "tensorflow":
            _configure(module)
