"""Which line of a program uses an old name, and the message about it.

The program is all code outside of Keras, TensorFlow and unisono, which see the plain names.
"""

import dis
import inspect
import os
import sys
from pathlib import PurePath
from types import FrameType
from typing import Any

from unisono.compat.knowledge import Change
from unisono.errors import LegacyError, LegacyImportError
from unisono.log import logger

_LIBRARIES = ("keras", "tensorflow", "unisono", "importlib", "contextlib", "functools")
_PASSED_THROUGH = ("unisono.compat.legacy", "importlib")
_GENERATED = "__autograph_generated_file"
_BY_NAME = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_NAME", "IMPORT_FROM", "IMPORT_NAME")
_announced: set[str] = set()


def caller() -> FrameType | None:
    """The frame that uses a name: the first outside of this package and of Python's imports."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _module(frame).startswith(_PASSED_THROUGH):
        frame = frame.f_back
    return frame


def is_asked_by_program() -> bool:
    """Whether the program, not a library, uses a name."""
    frame = caller()
    return frame is not None and not _is_library(frame)


def is_asked_by_installed() -> bool:
    """Whether an installed package uses a name, which the user cannot rewrite."""
    frame = caller()
    parts = PurePath(frame.f_code.co_filename).parts if frame is not None else ()
    return "site-packages" in parts or "dist-packages" in parts


def is_spelled_out() -> bool:
    """Whether the program wrote the name, rather than calling hasattr."""
    frame = caller()
    if frame is None or _is_library(frame) or frame.f_lasti < 0:
        return False
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in _BY_NAME


def imports_by_name(module: str) -> bool:
    """Whether the program's import names this module, not only a submodule."""
    frame = _program_frame()
    names = frame.f_code.co_names if frame is not None else ()
    parent, _, name = module.rpartition(".")
    return module in names or (parent in names and name in names)


def where(word: str = "") -> str:
    """The program's line, for messages; in a `tf.function`, the line with `word`."""
    frame = _program_frame()
    if frame is None:
        return "this program"
    line = _line_in_graph(frame, word) or frame.f_lineno
    return f"{_shown(frame.f_code.co_filename)}, line {line}"


def announce(old: str, write: str) -> None:
    """Print once what to write instead of an old name."""
    if old not in _announced:
        _announced.add(old)
        place = where(old.rpartition(".")[2])
        logger.warning(f"{place}: {old} is old; write {write}")


def refuse(change: Change) -> LegacyError:
    """The error for a name without a successor."""
    return LegacyImportError(
        f"{where()} asks for {change.old}, which can't be translated: {change.why}. Instead: "
        f"{change.write}."
    )


def _program_frame() -> FrameType | None:
    frame = caller()
    while frame is not None and (_is_library(frame) or _GENERATED in frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _line_in_graph(program: FrameType, word: str) -> int | None:
    """The line in a function that AutoGraph has rewritten and the program calls."""
    frame = caller()
    while frame is not None and frame is not program:
        if _GENERATED in frame.f_code.co_filename:
            line = _line_of(program.f_globals.get(frame.f_code.co_name.removeprefix("tf__")), word)
            if line is not None:
                return line
        frame = frame.f_back
    return None


def _line_of(function: Any, word: str) -> int | None:
    try:
        lines, first = inspect.getsourcelines(getattr(function, "python_function", function))
    except (OSError, TypeError):
        return None
    return next((first + i for i, line in enumerate(lines) if word in line), None)


def is_from_library(function: Any) -> bool:
    """Whether a function belongs to a library, not to the program."""
    return str(getattr(function, "__module__", "")).partition(".")[0] in _LIBRARIES


def _is_library(frame: FrameType) -> bool:
    return _module(frame).partition(".")[0] in _LIBRARIES


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _shown(path: str) -> str:
    here = os.path.relpath(path) if os.path.isabs(path) else path
    return here if not here.startswith("..") else path
