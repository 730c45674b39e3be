"""Comments for what a person has to do, as they are written and found in a program."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

MARK = "# unisono migrate: "
_MORE = "#     "
_WIDTH = 96


@dataclass(frozen=True)
class Remark:
    """What a person has to look at, and where: `line 12`, or `cell 3, line 2`."""

    place: str
    text: str


def comment_lines(text: str) -> list[str]:
    """A remark as the lines of a comment.

    >>> comment_lines("Look here.")
    ['# unisono migrate: Look here.']
    """
    first, *rest = textwrap.wrap(
        text, _WIDTH - len(MARK), break_long_words=False, break_on_hyphens=False
    )
    return [MARK + first, *(_MORE + line for line in rest)]


def lines_of(code: str) -> list[str]:
    """The lines of a program as Python counts them: a form feed does not end one."""
    return re.split(r"\r\n|\r|\n", code)


def remarks_in(lines: Sequence[str], cell: int | None = None) -> list[Remark]:
    """The remarks of a migrated program, with the lines that they are about."""
    found: list[Remark] = []
    i = 0
    while i < len(lines):
        text = lines[i].strip()
        i += 1
        if not text.startswith(MARK):
            continue
        parts = [text.removeprefix(MARK)]
        while i < len(lines) and lines[i].strip().startswith(_MORE):
            parts.append(lines[i].strip().removeprefix(_MORE))
            i += 1
        found.append(Remark(_place(lines, i, cell), " ".join(parts)))
    return found


def _place(lines: Sequence[str], start: int, cell: int | None) -> str:
    """The first line of code from here on."""
    number = next(
        (i for i in range(start, len(lines)) if not lines[i].strip().startswith("#")), start
    )
    line = f"line {number + 1}"
    return line if cell is None else f"cell {cell}, {line}"
