"""Reading and atomically replacing files, and the remarks that a migration leaves in them.

The old file stays as a backup, and no earlier backup is overwritten.
"""

import contextlib
import itertools
import os
import re
import shutil
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import DataError


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"Asked to migrate {str(path)!r}; it cannot be read: {error.strerror}."
        ) from error


def replace(path: Path, before: bytes, after: bytes) -> Path:
    """Replace the content of a file; returns the path of the backup."""
    target = Path(os.path.realpath(path))  # Keep a symbolic link.
    try:
        backup = _keep(target, before)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(after)
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(target, name)
            os.replace(name, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise DataError(f"Asked to write {str(path)!r}; that failed: {error.strerror}.") from error
    return backup


def _keep(path: Path, content: bytes) -> Path:
    for number in itertools.count():
        backup = path.with_name(f"{path.name}.orig{f'.{number}' if number else ''}")
        try:
            with backup.open("xb") as file:
                file.write(content)
        except FileExistsError:
            continue
        shutil.copystat(path, backup)
        return backup
    raise AssertionError("there is always another number")


MARK = "# unisono migrate: "
_MORE = "#     "
_WIDTH = 96


@dataclass(frozen=True)
class Remark:
    """What the user has to check, and where: `line 12`, or `cell 3, line 2`."""

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
    """The lines of a program as Python counts them: a form feed does not end a line."""
    return re.split(r"\r\n|\r|\n", code)


def remarks_in(lines: Sequence[str], cell: int | None = None) -> list[Remark]:
    """The remarks in a migrated program, with their lines."""
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
