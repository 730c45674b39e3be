"""Modules that went: found again, under the names that old programs import.

Horovod's are found only where Horovod itself is not installed.
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

from unisono.compat.knowledge import CHANGES, MODULES
from unisono.compat.legacy.lines import (
    announce,
    imports_by_name,
    is_asked_by_installed,
    is_asked_by_program,
    refuse,
)
from unisono.compat.lookup import canonical, gone_with

_ROOTS_OF_GONE = tuple({change.old.partition(".")[0] for change in CHANGES if change.why})


def find_old_modules() -> None:
    """Let old modules be imported from now on; calling it again changes nothing."""
    if not any(isinstance(finder, _OldModules) for finder in sys.meta_path):
        sys.meta_path.append(_OldModules())  # Asked last: what is there is found as ever.
        builtins.__import__ = _stopping_at_gone_modules(builtins.__import__)


def _stopping_at_gone_modules(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`import`, which stops a program at modules that nothing takes the place of.

    A finder would not do: TensorFlow itself has imported its private copy of Keras, and what is
    imported already is not looked for.
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
    """Finds a module that went, as one that has the names of its successor."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        successor = MODULES.get(canonical(fullname))
        if successor is None:
            return None
        return importlib.util.spec_from_loader(fullname, _Successor(successor), is_package=True)


class _Successor(importlib.abc.Loader):
    """Fills a module with the names of another one, as they are asked for."""

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
    """Whether a package is there by itself, and not through us."""
    return importlib.machinery.PathFinder.find_spec(package) is not None
