"""Statements that are taken out, and comments that are put in: what every step here shares."""

from collections.abc import Sequence
from typing import Any, ClassVar

import libcst as cst
from libcst.metadata import QualifiedNameProvider, QualifiedNameSource

from unisono.compat.migrate.remarks import MARK, comment_lines

_REMOVED = "unisono_removed"


class Step(cst.CSTTransformer):
    """A step of the migration, which may leave remarks above the statement that it is at."""

    METADATA_DEPENDENCIES: ClassVar[tuple[Any, ...]] = (QualifiedNameProvider,)

    def __init__(self) -> None:
        super().__init__()
        self._remarks: list[list[str]] = [[]]

    def remark(self, text: str) -> None:
        """Leave a comment for a person, above the statement that is being visited."""
        if text not in self._remarks[-1]:
            self._remarks[-1].append(text)

    def on_visit(self, node: cst.CSTNode) -> bool:
        if hasattr(node, "leading_lines"):
            self._remarks.append([])
        return super().on_visit(node)

    def on_leave(self, original: Any, updated: Any) -> Any:
        left: Any = super().on_leave(original, updated)
        if not hasattr(original, "leading_lines"):
            return left
        texts = self._remarks.pop()
        if not isinstance(left, cst.FlattenSentinel):
            return _with_remarks(left, texts)
        first, *others = list(left)
        return cst.FlattenSentinel([_with_remarks(first, texts), *others])

    def dotted(self, node: cst.CSTNode) -> str | None:
        """The imported name that an expression is for sure; None for all else."""
        names = self.get_metadata(QualifiedNameProvider, node, set()) or set()
        if not names or any(name.source is not QualifiedNameSource.IMPORT for name in names):
            return None
        return min(name.name for name in names)

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        body, footer = _settled(updated_node.body, updated_node.footer)
        return updated_node.with_changes(body=body, footer=footer)

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.BaseSuite:
        if not any(map(_is_removed, updated_node.body)):
            return updated_node
        body, footer = _settled(updated_node.body, updated_node.footer)
        if not body:
            leading = [line for line in footer if line.comment is not None]
            body = [cst.parse_statement("pass\n").with_changes(leading_lines=leading)]
            footer = ()
        return updated_node.with_changes(body=body, footer=footer)


def removed(statement: cst.SimpleStatementLine) -> cst.SimpleStatementLine:
    """A statement that will be gone, whose comments stay."""
    return statement.with_changes(body=[cst.Expr(cst.Name(_REMOVED))])


def _is_removed(statement: cst.CSTNode) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return False
    small = statement.body[0]
    return isinstance(small, cst.Expr) and _is_name(small.value, _REMOVED)


def _is_name(node: cst.CSTNode, name: str) -> bool:
    return isinstance(node, cst.Name) and node.value == name


def _settled(
    body: Sequence[Any], footer: Sequence[cst.EmptyLine]
) -> tuple[list[Any], Sequence[cst.EmptyLine]]:
    """The statements without those removed; comments above these go to what follows."""
    kept: list[Any] = []
    carried: list[cst.EmptyLine] = []
    for statement in body:
        if _is_removed(statement):
            if not carried or _has_comment(statement.leading_lines):
                carried += list(statement.leading_lines)
            if (comment := statement.trailing_whitespace.comment) is not None:
                carried.append(cst.EmptyLine(comment=comment))
        elif carried and hasattr(statement, "leading_lines"):
            own = list(statement.leading_lines)
            leading = [*carried, *own] if _has_comment(carried) else own or carried
            kept.append(statement.with_changes(leading_lines=leading))
            carried = []
        else:
            kept.append(statement)
    return kept, [*carried, *footer] if _has_comment(carried) else footer


def _has_comment(lines: Sequence[cst.EmptyLine]) -> bool:
    return any(line.comment is not None for line in lines)


def _with_remarks(statement: Any, texts: Sequence[str]) -> Any:
    if not texts or not hasattr(statement, "leading_lines"):
        return statement
    there = " ".join(
        (line.comment.value.removeprefix(MARK) if line.comment.value.startswith(MARK) else "")
        + line.comment.value.lstrip("# ")
        for line in statement.leading_lines
        if line.comment is not None
    )
    new = [text for text in texts if " ".join(text.split()) not in " ".join(there.split())]
    lines = [
        cst.EmptyLine(comment=cst.Comment(line)) for text in new for line in comment_lines(text)
    ]
    return statement.with_changes(leading_lines=[*statement.leading_lines, *lines])
