"""Imports of frameworks: Keras' backend, tested versions, and actions right after an import.

Some settings can only be made on an imported framework, and have to be made before it is used, so
they are made when it is imported. No framework is imported here, and no name is patched.
"""

import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from unisono.errors import VersionError

ANY_VERSION = "UNISONO_ANY_VERSION"
# The newest that all tests passed with; later patches of these are accepted as well.
_TESTED = {"keras": (3, 15), "jax": (0, 10), "tensorflow": (2, 21), "torch": (2, 13)}

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


def newest_tested(name: str) -> tuple[int, int]:
    """The newest version of Keras or a framework that all tests passed with."""
    return _TESTED[name]


def check_versions(*frameworks: str) -> None:
    """Raise VersionError where an imported framework is newer than those that were tested.

    Backends use names that no framework promises to keep, so a newer release may compute something
    else without an error. A bound among the dependencies would be final; this one is not.
    """
    if os.environ.get(ANY_VERSION, "0") not in ("", "0"):
        return
    for name in frameworks:
        version = str(getattr(sys.modules.get(name), "__version__", ""))
        found = re.match(r"(\d+)\.(\d+)", version)
        major, minor = _TESTED[name]
        if found is not None and tuple(map(int, found.groups())) > (major, minor):
            raise VersionError(
                f"Found {name} {version}; unisono was tested with {name} up to {major}.{minor}: "
                f'a newer one may train wrongly without an error. Install "{name}<{major}.'
                f'{minor + 1}", or a newer unisono, or set {ANY_VERSION}=1 to try it as it is.'
            )


class _AfterImport:
    """A finder on `sys.meta_path` that removes itself once its module is imported."""

    def __init__(self, name: str, action: Action) -> None:
        self.name = name
        self.actions = [action]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        # A search is not yet an import: programs look whether a framework is installed.
        place = sys.meta_path.index(self)
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(place, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenAct(spec.loader, self)  # type: ignore[assignment]
        return spec


class _ThenAct:
    """A module's own loader, followed by the actions that wait for it."""

    def __init__(self, loader: Any, finder: _AfterImport) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self._finder)
        # The module must look as if its own loader had loaded it.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for action in self._finder.actions:
            action(module)
