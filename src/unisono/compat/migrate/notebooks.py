"""Notebooks: their code cells are migrated as one program, and stay separate cells.

A cell may use what another one imported, so none can be read alone. Lines that IPython alone
understands stand aside while the rest is read as Python.
"""

import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from unisono.compat.migrate.files import Remark, lines_of, remarks_in
from unisono.compat.syntax import check_syntax
from unisono.errors import DataError

_MAGIC = re.compile(r"^\s*(%|!|\?|\w[\w.]*\?|\w+\s*=\s*[%!])")
_PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%prun")
Changes = list[tuple[str, list[str], list[str]]]


def migrate_notebook(content: bytes, place: str) -> tuple[bytes, Changes, list[Remark]]:
    """A migrated notebook, the changes of each cell, and what is left for the user."""
    notebook = _parse(content, place)
    cells = _code_cells(notebook, place)
    texts = {number: _source(cell, place) for number, cell in cells.items()}
    marks = _Marks.unused_in(texts.values())
    asides = {number: _set_aside(text, marks, place, number) for number, text in texts.items()}
    new = _split(_migrated(asides, marks, place), marks)
    changes, remarks = [], []
    for number, cell in cells.items():
        before, after = texts[number], new.get(number, texts[number])
        if after != before:
            changes.append(
                (f"{place}, cell {number}", before.splitlines(True), after.splitlines(True))
            )
            is_list = isinstance(cell["source"], list)
            cell["source"] = after.splitlines(keepends=True) if is_list else after
        remarks += remarks_in(lines_of(after), number)
    if not changes:
        return content, [], remarks
    end = b"\n" if content.endswith(b"\n") else b""
    return _as_bytes(notebook) + end, changes, remarks


@dataclass
class _Marks:
    """Comments that separate the cells in the joint program, and lines that are set aside."""

    word: str
    aside: list[str] = field(default_factory=list)

    @classmethod
    def unused_in(cls, texts: Iterable[str]) -> "_Marks":
        whole = "\n".join(texts)
        words = (f"unisono {number}" for number in itertools.count())
        return cls(next(word for word in words if word not in whole))

    @property
    def cell(self) -> str:
        return f"# {self.word} cell "

    @property
    def line(self) -> str:
        return f"pass  # {self.word} aside "


def _as_bytes(notebook: Any) -> bytes:
    try:
        return json.dumps(notebook, indent=1, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # Half a character, which JSON can have as an escape only.
        return json.dumps(notebook, indent=1).encode()


def _parse(content: bytes, place: str) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"))
    except RecursionError as error:
        raise DataError(f"{place} is no notebook: its JSON is nested too deeply.") from error
    except ValueError as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(f"{place}{line} is no notebook: broken JSON ({error}).") from error


def _code_cells(notebook: Any, place: str) -> dict[int, Any]:
    """The code cells by their number among all cells, from 1."""
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise DataError(
            f"{place} is no notebook of format 4: it has no list of cells. Open and save it with "
            "a recent Jupyter first."
        )
    return {
        number: cell
        for number, cell in enumerate(cells, start=1)
        if cell.get("cell_type") == "code"
    }


def _source(cell: Any, place: str) -> str:
    source = cell.get("source", "")
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        return "".join(source)
    if isinstance(source, str):
        return source
    raise DataError(f"{place} is no notebook: a cell has no text as its source.")


def _set_aside(text: str, marks: _Marks, place: str, number: int) -> str | None:
    """A cell as Python; None for a cell in another language."""
    first = text.lstrip().splitlines()[:1]
    is_magic = bool(first) and first[0].startswith("%%")
    if is_magic and first[0].split()[0] not in _PYTHON_CELLS:
        return None
    lines = text.split("\n")
    while True:
        try:
            check_syntax("\n".join(lines), f"{place}, cell {number}")
            return "\n".join(lines)
        except DataError as error:
            # Only where Python stumbles: a line of a longer expression may begin with % too.
            line = _line_of(error)
            if not 0 <= line < len(lines) or not _MAGIC.match(lines[line]):
                raise
            indent = lines[line][: len(lines[line]) - len(lines[line].lstrip())]
            end = line + 1
            while end < len(lines) and lines[end - 1].endswith("\\"):
                end += 1  # A command of several lines.
            marks.aside.append("\n".join(lines[line:end]))
            lines[line:end] = [f"{indent}{marks.line}{len(marks.aside) - 1}"]


def _line_of(error: DataError) -> int:
    cause = error.__cause__
    return (cause.lineno or 0) - 1 if isinstance(cause, SyntaxError) else -1


def _migrated(texts: dict[int, str | None], marks: _Marks, place: str) -> str:
    from unisono.compat.migrate.source import migrate_source

    parts = [
        f"{marks.cell}{number}\n{text}\n" for number, text in texts.items() if text is not None
    ]
    return migrate_source("".join(parts).encode(), place).code.decode()


def _split(code: str, marks: _Marks) -> dict[int, str]:
    """The cells of a migrated program, with the lines that were set aside."""
    found: dict[int, list[str]] = {}
    number = 0
    # Each cell was given a line end of its own.
    for line in code.removesuffix("\n").split("\n"):
        stripped = line.strip()
        if stripped.startswith(marks.cell):
            number = int(stripped.removeprefix(marks.cell))
            found[number] = []
        elif stripped.startswith(marks.line):
            found[number].append(marks.aside[int(stripped.removeprefix(marks.line))])
        elif number:
            found[number].append(line)
    return {number: "\n".join(lines) for number, lines in found.items()}
