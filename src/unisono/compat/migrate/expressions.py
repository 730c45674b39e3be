"""Small pieces of source: read, compared and made."""

import ast
from collections.abc import Mapping, Sequence
from typing import Any

import libcst as cst

_NO_SPACE = cst.AssignEqual(
    whitespace_before=cst.SimpleWhitespace(""), whitespace_after=cst.SimpleWhitespace("")
)


def expression(source: str) -> cst.BaseExpression:
    return cst.parse_expression(source)


def source_of(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def dotted_name(node: cst.CSTNode) -> str:
    """A name with dots, without the spaces that Python allows around them."""
    return source_of(node).replace(" ", "")


def keyword(name: str, value: cst.BaseExpression) -> cst.Arg:
    return cst.Arg(value, keyword=cst.Name(name), equal=_NO_SPACE)


def call(function: str, *args: cst.Arg) -> cst.Call:
    return cst.Call(expression(function), list(args))


def literal(node: cst.CSTNode | None) -> Any:
    """The value of an expression that is a constant; Ellipsis for any other."""
    if node is None:
        return ...
    try:
        return ast.literal_eval(source_of(node))
    except (ValueError, SyntaxError, TypeError, MemoryError):
        return ...


def text_like(node: cst.SimpleString, text: str) -> cst.SimpleString:
    """Another text in the quotes of this one."""
    return node.with_changes(value=f"{node.prefix}{node.quote}{text}{node.quote}")


def bound(args: Sequence[cst.Arg], parameters: Sequence[str]) -> dict[str, cst.Arg] | None:
    """The arguments by the names of their parameters; None where that can't be told."""
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
    """The arguments as keywords, where they are not already."""
    return [
        arg
        if arg.keyword is not None and arg.keyword.value == name
        else arg.with_changes(keyword=cst.Name(name), equal=_NO_SPACE)
        for name, arg in args.items()
    ]


def without_last_comma(args: Sequence[cst.Arg], like: Sequence[cst.Arg]) -> list[cst.Arg]:
    """Arguments whose last one ends as the last one of others did."""
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
