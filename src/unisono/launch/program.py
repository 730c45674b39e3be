"""Runs a user's program in this process as `__main__`, just as Python itself would run it."""

import builtins
import io
import os
import runpy
import sys
import types
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader


def run_program(program: Sequence[str]) -> None:
    """Run a script with its arguments, or `-m`, a module and its arguments."""
    is_module = program[0] == "-m"
    name = program[1] if is_module else program[0]
    sys.argv = list(program[1:] if is_module else program)
    if is_module:
        _run_module(name, os.getcwd())
    elif os.path.isdir(name) or not _is_source(name):
        _run_module("__main__", name)
    else:
        _run_file(name)


def _run_file(name: str) -> None:
    path = os.path.abspath(name)
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(name)))
    loader = SourceFileLoader("__main__", path)
    module = _new_main()
    module.__file__ = path
    module.__loader__ = loader
    with io.open_code(path) as file:
        code = loader.source_to_code(file.read(), path)
    exec(code, vars(module))


def _run_module(name: str, folder: str) -> None:
    if name == "__main__" or not sys.flags.safe_path:
        sys.path.insert(0, folder)
    _new_main()
    # What the interpreter itself calls for `python -m` and for folders.
    runpy._run_module_as_main(name, alter_argv=name != "__main__")  # type: ignore[attr-defined]


def _new_main() -> types.ModuleType:
    """An empty `__main__`, so that what the program defines can be pickled by its name."""
    module = types.ModuleType("__main__")
    vars(module).update(__builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = module
    return module


def _is_source(name: str) -> bool:
    """Whether a file is text; else it is an archive with a `__main__.py` in it."""
    with open(name, "rb") as file:
        return file.read(4) != b"PK\x03\x04"
