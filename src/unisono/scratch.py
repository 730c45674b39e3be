"""Temporary folders that are removed with their process, or after it.

A process that is killed cannot tidy up. Each folder therefore holds a file that its process keeps
locked; the kernel drops the lock however the process ends, and whoever makes the next folder of
that kind removes those that nobody holds. The name has the host in it, since other machines that
see the same disk may not see the lock.
"""

import contextlib
import fcntl
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

TEMPORARY = "unisono-"
"""How folders in the system's temporary directory begin."""

_LOCK = "unisono.lock"
_MAX_HOST_CHARS = 40


class Scratch:
    """A new folder of this process, in `parent`; removed by `close` or at the end of a `with`."""

    def __init__(self, prefix: str = TEMPORARY, parent: Path | None = None) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        self._lock: int | None = None
        while self._lock is None:
            # A sweep of another process may come between the folder and its lock.
            self.path = Path(tempfile.mkdtemp(prefix=_begin(prefix), dir=parent))
            self._lock = _hold(self.path)

    def __enter__(self) -> "Scratch":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None


def sweep(
    prefix: str = TEMPORARY,
    parent: Path | None = None,
    rescue: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Remove the folders that ended processes of this user and host have left.

    `rescue(folder)` is called before a folder goes.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and _is_candidate(entry):
                with contextlib.suppress(OSError):
                    _remove_if_left(Path(entry.path), rescue)


@contextlib.contextmanager
def temporary_folder(prefix: str = TEMPORARY) -> Iterator[Path]:
    """An empty folder in the system's temporary directory; those that kills have left go first."""
    sweep()
    with Scratch(prefix) as scratch:
        folder = scratch.path / "files"
        folder.mkdir()
        yield folder


def hold(file: int) -> None:
    """Keep a file of this process from `sweep_files`, for as long as it is open."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def sweep_files(folder: Path, name: re.Pattern[str]) -> None:
    """Remove files that nobody holds any more, of a folder in which all of such a name are held."""
    for path in folder.iterdir():
        if not name.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(file)


def _begin(prefix: str) -> str:
    host = re.sub("[^A-Za-z0-9_.]", "_", socket.gethostname())[:_MAX_HOST_CHARS]
    return f"{prefix}{host}-"


def _is_candidate(entry: "os.DirEntry[str]") -> bool:
    host = _begin("")
    is_named = f"-{host}" in f"-{entry.name}" and entry.is_dir(follow_symlinks=False)
    return is_named and entry.stat(follow_symlinks=False).st_uid == os.geteuid()


def _hold(folder: Path) -> int | None:
    """Lock a folder for as long as this process lives; None where it has been swept away."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    # Where a file system knows no locks, sweeps fail as well, and remove nothing.
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX)
    if os.fstat(lock).st_nlink:
        return lock
    os.close(lock)
    return None


def _remove_if_left(folder: Path, rescue: Callable[[Path], None]) -> None:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        folder.rmdir()  # Killed in between; what is not empty is not ours, and stays.
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        rescue(folder)
        shutil.rmtree(folder)
    finally:
        os.close(lock)
