"""The base class of all steps, which removes statements and adds remarks; small expressions."""

import ast
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import libcst as cst
from libcst.metadata import QualifiedNameProvider, QualifiedNameSource

from unisono.compat.migrate.files import MARK, comment_lines

_REMOVED = "unisono_removed"


class MigrationStep(cst.CSTTransformer):
    """A step of the migration; it can leave remarks above the current statement."""

    METADATA_DEPENDENCIES: ClassVar[tuple[Any, ...]] = (QualifiedNameProvider,)

    def __init__(self) -> None:
        super().__init__()
        self._remarks: list[list[str]] = [[]]

    def remark(self, text: str) -> None:
        """Leave a comment for the user above the current statement."""
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
        """The imported name that an expression refers to; None if that is not certain."""
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
    """Mark a statement for removal; its comments stay."""
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
    """The statements without the removed ones, whose comments move to the next statement."""
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


_NO_SPACE = cst.AssignEqual(
    whitespace_before=cst.SimpleWhitespace(""), whitespace_after=cst.SimpleWhitespace("")
)


def expression(source: str) -> cst.BaseExpression:
    return cst.parse_expression(source)


def source_of(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def dotted_name(node: cst.CSTNode) -> str:
    """A dotted name without spaces around the dots."""
    return source_of(node).replace(" ", "")


def keyword(name: str, value: cst.BaseExpression) -> cst.Arg:
    return cst.Arg(value, keyword=cst.Name(name), equal=_NO_SPACE)


def call(function: str, *args: cst.Arg) -> cst.Call:
    return cst.Call(expression(function), list(args))


def literal(node: cst.CSTNode | None) -> Any:
    """The value of a constant expression; Ellipsis for any other."""
    if node is None:
        return ...
    try:
        return ast.literal_eval(source_of(node))
    except (ValueError, SyntaxError, TypeError, MemoryError):
        return ...


def text_like(node: cst.SimpleString, text: str) -> cst.SimpleString:
    """Another string with the same quotes."""
    return node.with_changes(value=f"{node.prefix}{node.quote}{text}{node.quote}")


def bound(args: Sequence[cst.Arg], parameters: Sequence[str]) -> dict[str, cst.Arg] | None:
    """The arguments by parameter name; None if they are not all known."""
    found: dict[str, cst.Arg] = {}
    for i, arg in enumerate(args):
        if arg.star or (arg.keyword is None and i >= len(parameters)):
            return None
        name = arg.keyword.value if arg.keyword is not None else parameters[i]
        if name in found:
            return None
        found[name] = arg
    return found


def named(args: Mapping[str, cst.Arg]) -> list[cst.Arg]:
    """All arguments as keyword arguments."""
    return [
        arg
        if arg.keyword is not None and arg.keyword.value == name
        else arg.with_changes(keyword=cst.Name(name), equal=_NO_SPACE)
        for name, arg in args.items()
    ]


def without_last_comma(args: Sequence[cst.Arg], like: Sequence[cst.Arg]) -> list[cst.Arg]:
    """Arguments with the trailing comma of `like`."""
    if not args:
        return []
    last = like[-1].comma if like else cst.MaybeSentinel.DEFAULT
    middle = [
        arg.with_changes(
            comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
            if isinstance(arg.comma, cst.MaybeSentinel)
            else arg.comma
        )
        for arg in args[:-1]
    ]
    return [*middle, args[-1].with_changes(comma=last)]
