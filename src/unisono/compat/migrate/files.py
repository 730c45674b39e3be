"""Files read whole and replaced at once: a reader sees the old one or the new one.

The old one stays beside it under a name of its own, and no earlier backup is overwritten.
"""

import contextlib
import itertools
import os
import shutil
import tempfile
from pathlib import Path

from unisono.errors import SourceError


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SourceError(
            f"Asked to migrate {str(path)!r}; it cannot be read: {error.strerror}."
        ) from error


def replace(path: Path, before: bytes, after: bytes) -> Path:
    """Put new content in a file's place; returns where the old one is kept."""
    target = Path(os.path.realpath(path))  # A link goes on leading to the file.
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
        raise SourceError(
            f"Asked to write {str(path)!r}; that failed: {error.strerror}."
        ) from error
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
