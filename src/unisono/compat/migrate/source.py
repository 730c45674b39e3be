"""The migration of one program's source: the steps in their order."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper

from unisono.compat.migrate.additions import add_imports
from unisono.compat.migrate.imports import Imports, names_in_use
from unisono.compat.migrate.keys import Keys
from unisono.compat.migrate.remarks import Remark, lines_of, remarks_in
from unisono.compat.migrate.rewriting import Rewriting
from unisono.compat.migrate.sessions import Sessions
from unisono.compat.syntax import check_syntax, too_deep
from unisono.errors import SourceError

_MOST_ROUNDS = 5
_MOST_FRAMES = 20_000


@dataclass(frozen=True)
class Migrated:
    """A migrated program, and what is left for a person."""

    code: bytes
    lines_before: list[str]
    lines_after: list[str]
    remarks: list[Remark]


def migrate_source(code: bytes, place: str) -> Migrated:
    """Rewrite a program; `place` is what messages call it. SourceError where it is no Python 3.

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
        raise SourceError(f"{place} can't be read by LibCST: {error}") from error
    except RecursionError as error:
        raise SourceError(too_deep(place)) from error
    return Migrated(
        after.bytes,
        before.code.splitlines(keepends=True),
        after.code.splitlines(keepends=True),
        remarks_in(lines_of(after.code)),
    )


@contextlib.contextmanager
def _deep_recursion() -> Iterator[None]:
    """Room for a sum of many terms, which is as deep as it is long; several frames for each."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _MOST_FRAMES))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def translate(module: cst.Module) -> cst.Module:
    """The module with today's names, to which nothing more is to be done."""
    for _ in range(_MOST_ROUNDS):
        # An import that was added may tell what a name is which nothing told before.
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
    """The same code, where comments above the first statement belong to it, as to any other."""
    if not module.header or not module.body:
        return module
    first: Any
    first, *others = module.body
    lines = [*module.header, *first.leading_lines]
    first = first.with_changes(leading_lines=lines)
    return module.with_changes(header=[], body=[first, *others])
