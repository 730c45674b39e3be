"""Looks up calls in the text of a program: where a cause can be seen in no recorded value."""

import ast
import contextlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from unisono.verify.records import Site
from unisono.verify.sites import site_at

CLIPPING = {
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_by_value",
}


def calls(files: Iterable[str], names: Collection[str]) -> Iterator[Site]:
    """Lines that call a function of one of these names, by whatever object."""
    for file, tree in _trees(files):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _name(node.func) in names:
                yield site_at(file, node.lineno)


def mentions(
    files: Iterable[str], names: Collection[str], *, is_attribute: bool = False
) -> Iterator[Site]:
    """Lines that use one of these names or attributes, or attributes alone."""
    kinds = (ast.Attribute,) if is_attribute else (ast.Name, ast.Attribute)
    for file, tree in _trees(files):
        for node in ast.walk(tree):
            if isinstance(node, kinds) and _name(node) in names:
                yield site_at(file, node.lineno)


def assignments(files: Iterable[str], name: str) -> Iterator[Site]:
    """Lines outside of `__init__` that assign an attribute of this name, then those inside."""
    inside = []
    for file, tree in _trees(files):
        first = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef) and function.name == "__init__"
            for node in ast.walk(function)
        }
        for node in ast.walk(tree):
            if not isinstance(node, (ast.Assign, ast.AugAssign)):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Attribute) and t.attr == name for t in targets):
                site = site_at(file, node.lineno)
                if id(node) in first:
                    inside.append(site)
                else:
                    yield site
    yield from inside


def keywords(files: Iterable[str], name: str) -> Iterator[Site]:
    """Lines that pass a keyword argument of this name."""
    for file, tree in _trees(files):
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == name:
                yield site_at(file, node.value.lineno)


def _trees(files: Iterable[str]) -> Iterator[tuple[str, ast.AST]]:
    for file in files:
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            yield file, ast.parse(Path(file).read_bytes())


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
