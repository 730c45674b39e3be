"""The imports that new names need, put where a reader looks for them."""

from collections.abc import Sequence
from typing import Any

import libcst as cst

from unisono.compat.migrate.expressions import dotted_name, source_of
from unisono.compat.migrate.remarks import MARK

FRAMEWORKS = ("keras", "tensorflow", "horovod")


def add_imports(module: cst.Module, needed: set[str]) -> cst.Module:
    """The module with imports that are not there yet, above the first of the frameworks."""
    there = {source_of(small).strip() for line in module.body for small in _imports_in(line)}
    if any(text.startswith("import unisono.") and " as " not in text for text in there | needed):
        there.add("import unisono")
    lines = [cst.parse_statement(text + "\n") for text in sorted(needed - there)]
    if not lines:
        return module
    place = next(
        (i for i, statement in enumerate(module.body) if _names_framework(statement)),
        _after_head(module.body),
    )
    body: list[Any] = list(module.body)
    if place < len(body):
        above = list(getattr(body[place], "leading_lines", ()))
        # A remark stays with what it is about.
        split = next((i for i, line in enumerate(above) if _is_remark(line)), len(above))
        body[place] = body[place].with_changes(leading_lines=above[split:])
        lines[0] = lines[0].with_changes(leading_lines=above[:split])
    return module.with_changes(body=[*body[:place], *lines, *body[place:]])


def _is_remark(line: cst.EmptyLine) -> bool:
    return line.comment is not None and line.comment.value.startswith(MARK)


def _imports_in(statement: Any) -> list[cst.BaseSmallStatement]:
    body = statement.body if isinstance(statement, cst.SimpleStatementLine) else []
    return [small for small in body if isinstance(small, (cst.Import, cst.ImportFrom))]


def _names_framework(statement: Any) -> bool:
    for small in _imports_in(statement):
        if isinstance(small, cst.Import):
            roots = [root(dotted_name(alias.name)) for alias in small.names]
        else:
            assert isinstance(small, cst.ImportFrom)
            roots = [root(dotted_name(small.module))] if small.module is not None else []
        if {*FRAMEWORKS, "unisono"} & set(roots):
            return True
    return False


def _after_head(body: Sequence[Any]) -> int:
    """Where imports may begin: after a docstring and imports from `__future__`."""
    place = 0
    for i, statement in enumerate(body):
        if not isinstance(statement, cst.SimpleStatementLine):
            break
        small = statement.body[0]
        is_docstring = (
            i == 0
            and isinstance(small, cst.Expr)
            and isinstance(small.value, (cst.SimpleString, cst.ConcatenatedString))
        )
        is_future = isinstance(small, cst.ImportFrom) and (
            small.module is not None and dotted_name(small.module) == "__future__"
        )
        if not is_docstring and not is_future:
            break
        place = i + 1
    return place


def root(dotted: str) -> str:
    return dotted.partition(".")[0]
