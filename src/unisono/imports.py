"""What is imported and what will be: Keras' backend, and work to do once a framework is there.

Some settings can only be made on an imported framework, and have to be made before it is used.
The import itself is the moment for them. No framework is imported here, and no name is patched.
"""

import importlib.abc
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

Action = Callable[[Any], None]


def after_import(name: str, action: Action) -> None:
    """Call `action` with a module: now if it is imported, else right after it will be."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    for finder in sys.meta_path:
        if isinstance(finder, _AfterImport) and finder.name == name:
            finder.actions.append(action)
            return
    sys.meta_path.insert(0, _AfterImport(name, action))


def keras_backend() -> str:
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
    """Waits for a module to be imported, and goes once it has been."""

    def __init__(self, name: str, action: Action) -> None:
        self.name = name
        self.actions = [action]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        # Being asked is not yet an import: programs look whether a framework is there.
        place = sys.meta_path.index(self)
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(place, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenAct(spec.loader, self)
        return spec


class _ThenAct(importlib.abc.Loader):
    """A module's own loader, followed by the actions that wait for it."""

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
        for action in self._finder.actions:
            action(module)
