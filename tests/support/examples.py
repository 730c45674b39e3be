"""Runs the examples of the documentation, each as a program of its own, and prints a report.

`python examples.py ROOT` runs every python block of README.md and docs/, and every doctest, on the
backend that KERAS_BACKEND names. One process for all: each starts with fresh names and a fresh
environment, and what unisono reads from the environment it reads when it is called. What calls
`configure` or asks for old names gets a process of its own (`python examples.py ROOT NAME`), as
that is once for all.
"""

import ast
import contextlib
import doctest
import functools
import importlib
import io
import json
import linecache
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import unisono

# What a program does to its process for as long as it runs.
_FOR_GOOD = ("configure(", "compat.legacy")
BACKENDS = ("jax", "tensorflow", "torch")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and the line that it starts on."""

    page: str
    line: int
    language: str
    code: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def backends(self) -> tuple[str, ...]:
        """Those that the block names beside KERAS_BACKEND, or all."""
        named = re.findall(r"KERAS_BACKEND\W+(jax|tensorflow|torch)\b", self.code)
        return tuple(named) or BACKENDS

    def run(self) -> None:
        # Empty lines in front, so that a traceback shows the page's own line numbers.
        source = "\n" * self.line + self.code
        # AutoGraph reads the source of functions; it would find this file's lines.
        linecache.cache[self.page] = (len(source), None, source.splitlines(True), self.page)
        exec(compile(source, self.page, "exec"), {"__name__": "__main__"})


def blocks(root: Path) -> list[Block]:
    """All fenced blocks of the pages, in order."""
    found = []
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(str(path.relative_to(root)), line, match[1], match[2]))
    return found


def documented_modules() -> dict[str, str]:
    """Modules with examples, and their source; but for backends, whose names are private."""
    package = Path(unisono.__file__).parent
    sources = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        source = path.read_text(encoding="utf-8")
        if ">>> " in source and not {"backends", "replication"} & set(parts):
            sources[".".join(parts)] = source
    return sources


@functools.cache
def doctest_names() -> frozenset[str]:
    """What has an example in its docstring; read from the sources, as modules may import Keras."""
    return frozenset(
        name
        for module, source in documented_modules().items()
        for name, text in _docstrings(module, ast.parse(source))
        if ">>> " in text
    )


def _docstrings(name: str, node: ast.AST) -> Iterator[tuple[str, str]]:
    yield name, ast.get_docstring(node) or ""
    for child in node.body:
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            yield from _docstrings(f"{name}.{child.name}", child)


def doctests() -> list[doctest.DocTest]:
    """The examples in docstrings, ready to be run."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [
        test
        for name in documented_modules()
        for test in finder.find(importlib.import_module(name), name)
        if test.examples
    ]


def run_doctest(test: doctest.DocTest) -> None:
    output = io.StringIO()
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=output.write)
    if output.getvalue():
        raise AssertionError(output.getvalue())


def run_apart(name: str) -> None:
    """Run one example in a process of its own."""
    command = [sys.executable, *sys.argv[:2], name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise AssertionError(done.stderr)
    told = json.loads(done.stdout.splitlines()[-1])[name]
    print(told["output"])
    if told["error"]:
        raise AssertionError(told["error"])


def main() -> None:
    backend = os.environ["KERAS_BACKEND"]
    pages = [block for block in blocks(Path(sys.argv[1])) if block.language == "python"]
    jobs = {block.name: block.run for block in pages if backend in block.backends}
    apart = {block.name for block in pages if any(word in block.code for word in _FOR_GOOD)}
    for test in doctests():
        jobs[test.name] = lambda test=test: run_doctest(test)
        if "configure(" in (test.docstring or ""):
            apart.add(test.name)
    if len(sys.argv) > 2:
        jobs = {sys.argv[2]: jobs[sys.argv[2]]}
    else:
        jobs |= {name: functools.partial(run_apart, name) for name in apart & set(jobs)}
    report = {}
    for name, job in jobs.items():
        environment = dict(os.environ)
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                job()
            report[name] = {"output": output.getvalue(), "error": ""}
        except BaseException:
            report[name] = {"output": output.getvalue(), "error": traceback.format_exc()}
        os.environ.clear()
        os.environ.update(environment)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
