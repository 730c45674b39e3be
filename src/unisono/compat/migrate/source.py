"""The migration of a program's source: the steps in order."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper

from unisono.compat.migrate.files import Remark, lines_of, remarks_in
from unisono.compat.migrate.imports import Imports, add_imports, names_in_use
from unisono.compat.migrate.keys import Keys
from unisono.compat.migrate.rewriting import Rewriting
from unisono.compat.migrate.sessions import Sessions
from unisono.compat.syntax import check_syntax, too_deep
from unisono.errors import DataError

_MAX_ROUNDS = 5
_MAX_FRAMES = 20_000


@dataclass(frozen=True)
class Migrated:
    """A migrated program, and what is left for the user."""

    code: bytes
    lines_before: list[str]
    lines_after: list[str]
    remarks: list[Remark]


def migrate_source(code: bytes, place: str) -> Migrated:
    """Rewrite a program; `place` names it in messages. DataError if it is not Python 3.

    >>> migrated = migrate_source(b"from keras.optimizers import sgd\\n", "old.py")
    >>> migrated.code
    b'from keras.optimizers import SGD\\n'
    """
    check_syntax(code, place)
    try:
        with _deep_recursion():
            before = cst.parse_module(code)
            after = translate(before)
    except (cst.ParserSyntaxError, UnicodeDecodeError) as error:
        raise DataError(f"{place} can't be read by LibCST: {error}") from error
    except RecursionError as error:
        raise DataError(too_deep(place)) from error
    return Migrated(
        after.bytes,
        before.code.splitlines(keepends=True),
        after.code.splitlines(keepends=True),
        remarks_in(lines_of(after.code)),
    )


@contextlib.contextmanager
def _deep_recursion() -> Iterator[None]:
    """A higher recursion limit: the tree of a sum of many terms is as deep as it is long."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _MAX_FRAMES))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def translate(module: cst.Module) -> cst.Module:
    """The migrated module: repeats the steps until nothing changes."""
    for _ in range(_MAX_ROUNDS):
        # An added import may resolve a name that was unknown before.
        before, module = module.code, _translate_once(module)
        if module.code == before:
            break
    return module


def _translate_once(module: cst.Module) -> cst.Module:
    needed: set[str] = set()
    module = _with_header_in_body(module)
    module = MetadataWrapper(module).visit(Sessions(needed))
    module = MetadataWrapper(module).visit(Rewriting(needed))
    module = MetadataWrapper(module).visit(Keys())
    module = MetadataWrapper(module).visit(Imports(names_in_use(module)))
    return add_imports(module, needed)


def _with_header_in_body(module: cst.Module) -> cst.Module:
    """The same code, with the comments above the first statement attached to it."""
    if not module.header or not module.body:
        return module
    first: Any
    first, *others = module.body
    lines = [*module.header, *first.leading_lines]
    first = first.with_changes(leading_lines=lines)
    return module.with_changes(header=[], body=[first, *others])
