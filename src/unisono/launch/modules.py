"""Whether a module can be run by `-m`, found out without importing anything.

The launcher must not import a user's packages: they may load a framework.
"""

import importlib.machinery
import importlib.util
import os
import sys

from unisono.errors import LaunchError


def check_module(name: str) -> None:
    """LaunchError where Python would not find a module of that name."""
    top, *rest = name.split(".")
    sys.path.insert(0, os.getcwd())  # Where `python -m` looks first.
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path.pop(0)
    for i, _ in enumerate(rest, 1):
        if spec is None or spec.submodule_search_locations is None:
            break
        full = ".".join([top, *rest[:i]])
        spec = importlib.machinery.PathFinder.find_spec(full, spec.submodule_search_locations)
    else:
        if spec is not None and spec.submodule_search_locations is not None:
            full, places = f"{name}.__main__", spec.submodule_search_locations
            spec = importlib.machinery.PathFinder.find_spec(full, places)
        if spec is not None:
            return
    raise LaunchError(
        f"Asked to run the module {name!r}; Python finds none of that name that can be run. Look "
        "at its spelling, and at the folder and the environment that this is run in."
    )
