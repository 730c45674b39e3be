"""Which line of the user's program a call came from, and what that program is made of.

The user's files are those outside of the standard library, of installed packages and of unisono;
recipes count as a user's programs.
"""

import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import unisono
from unisono.verify.records import Site

_PACKAGE = str(Path(unisono.__file__).parent) + os.sep
_RECIPES = os.path.join(_PACKAGE, "recipes") + os.sep
_INSTALLED = tuple(
    os.path.realpath(path) + os.sep
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_known: dict[str, bool] = {}


def is_of_user(file: str) -> bool:
    """Whether a file is of the program, and not of a library that it uses."""
    if file not in _known:
        _known[file] = _is_of_user(file)
    return _known[file]


def _is_of_user(file: str) -> bool:
    if file.startswith("<ipython") or "ipykernel" in file:
        return True
    if not file or file.startswith("<") or not os.path.isfile(file):
        return False
    path = os.path.realpath(file)
    if path.startswith(_PACKAGE):
        return path.startswith(_RECIPES)
    if "site-packages" in path or "dist-packages" in path:
        return False
    return not path.startswith(_INSTALLED)


def user_site(frame: FrameType | None = None) -> Site | None:
    """The innermost line of the program that led here; None where none did."""
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        if is_of_user(frame.f_code.co_filename):
            return site_at(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def site_at(file: str, line: int) -> Site:
    return Site(os.path.abspath(file), line, linecache.getline(file, line).strip())


def site_of_traceback(trace: Any) -> Site | None:
    """The innermost line of the program in a traceback."""
    found = None
    while trace is not None:
        if is_of_user(trace.tb_frame.f_code.co_filename):
            found = site_at(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return found


def site_of_code(function: Any) -> Site | None:
    """The first line of a function of the program."""
    code = getattr(function, "__code__", None)
    if code is None or not is_of_user(code.co_filename):
        return None
    return site_at(code.co_filename, code.co_firstlineno)


def user_files() -> Iterator[str]:
    """The files of the program that are loaded in this process."""
    seen = set()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file not in seen and is_of_user(file):
            seen.add(file)
            yield file


def names_unisono() -> bool:
    """Whether the program uses unisono by itself."""
    for file in user_files():
        try:
            text = Path(file).read_text("utf-8", errors="replace")
        except OSError:
            continue
        if re.search(r"^\s*(import|from)\s+unisono\b", text, re.MULTILINE):
            return True
        if "import_module" in text and "unisono" in text:
            return True
    return False
