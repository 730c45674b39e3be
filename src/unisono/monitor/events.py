"""What runs publish of themselves: small append-only files, one of each process, in a folder.

A record is a line of JSON; the first says who writes, the others how training goes. Writing is
best effort, from a thread of its own: a full disk or a folder that cannot be written to ends the
publishing and never the training. Whoever reads needs nothing of the run but these files.
"""

import contextlib
import dataclasses
import json
import os
import re
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "UNISONO_RUNS"
"""Where the runs' folders are; empty for no publishing at all."""

_MOST_BYTES = 1 << 20
_LAST_BYTES = 1 << 13
_KEPT_S = 7 * 24 * 3600
_FILE_NAME = re.compile(r"rank-[0-9]+\.(jsonl|new)")
_WRITER_KEYS = {"host", "pid", "rank", "world_size", "backend"}
# Letters of the system for a process' state. One that has ended is there until its parent asks.
_ENDED, _STOPPED = frozenset("ZXx"), frozenset("Tt")


@dataclass(frozen=True)
class Writer:
    """Who writes a file: one process of a run."""

    run: str
    host: str
    pid: int
    started: float
    """When the process was started, by the machine's clock ticks: a number that is used again
    belongs to another process."""
    rank: int
    world_size: int
    num_replicas: int
    """Of this process."""
    devices: str
    backend: str
    program: str
    began: float


@dataclass(frozen=True)
class Progress:
    """How training goes in one process, at one moment."""

    at: float
    epoch: int
    num_epochs: int | None
    step: int
    num_steps: int | None
    """Of an epoch."""
    samples_per_s: float | None
    steps_per_s: float | None
    input_wait: float | None
    """The share of the time in which the step waited for data."""
    loss: float | None
    peer_wait: float | None = None
    """The share of the time in which this process waited for others of its run."""
    is_over: bool = False
    failed_with: str | None = None
    """The name of the error that ended training."""


@dataclass(frozen=True)
class RankEvents:
    """What is known of one process of a run."""

    writer: Writer
    last: Progress | None
    is_alive: bool
    is_stopped: bool = False
    """Whether the process is held by SIGSTOP, Ctrl-Z or a debugger."""


def runs_folder(env: Mapping[str, str]) -> Path | None:
    """Where runs publish; None where they do not."""
    if FOLDER in env:
        return Path(env[FOLDER]) if env[FOLDER] else None
    base = env.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "unisono" / "runs"


class EventFile:
    """The file of one process. Nothing here raises: what cannot be written is not."""

    def __init__(self, folder: Path, writer: Writer) -> None:
        self._writer = writer
        self._file: int | None = None
        self._num_bytes = 0
        with contextlib.suppress(OSError):
            _forget_old(folder)
        self._path = folder / writer.run / f"rank-{writer.rank}.jsonl"
        self._open()

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def write(self, progress: Progress) -> None:
        if self._num_bytes > _MOST_BYTES:
            self.close()
            self._open()  # Anew: what is long past helps nobody.
        self._append(dataclasses.asdict(progress))

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._file = None

    def _open(self) -> None:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = self._path.with_suffix(".new")
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(draft, flags, 0o600)
            self._num_bytes = 0
            self._append(dataclasses.asdict(self._writer))
            os.replace(draft, self._path)
        except OSError:
            self.close()

    def _append(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        line = json.dumps(record, allow_nan=True).encode() + b"\n"
        try:
            self._num_bytes += os.write(self._file, line)
        except OSError:
            self.close()


def read_runs(folder: Path | None, host: str | None = None) -> dict[str, list[RankEvents]]:
    """The runs of a host, by name, with their processes by rank."""
    host = host or socket.gethostname()
    found: dict[str, list[RankEvents]] = {}
    for path in sorted(folder.glob("*/rank-*.jsonl")) if folder is not None else ():
        events = _read(path)
        if events is not None and events.writer.host == host:
            found.setdefault(events.writer.run, []).append(events)
    for ranks in found.values():
        ranks.sort(key=lambda events: events.writer.rank)
    return found


def ticks_of(pid: int) -> float:
    """When a process was started, in the machine's own count; 0 where it is gone."""
    return process_state(pid)[1]


def process_state(pid: int) -> tuple[str, float]:
    """A process' state, in the system's letters, and when it was started; 0 where it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", 0.0
    words = text.rpartition(")")[2].split()
    return words[0], float(words[19])


def _read(path: Path) -> RankEvents | None:
    try:
        with path.open("rb") as file:
            writer = Writer(**json.loads(file.readline()))
            start = file.tell()
            file.seek(max(start, file.seek(0, 2) - _LAST_BYTES))
            lines = file.read().splitlines()
    except (OSError, ValueError, TypeError):
        return None  # Half written, or of another version.
    last = next(_whole(lines), None)
    state, started = process_state(writer.pid)
    is_there = bool(writer.started) and started == writer.started and state not in _ENDED
    is_alive = is_there and not (last is not None and last.is_over)
    return RankEvents(writer, last, is_alive, is_alive and state in _STOPPED)


def _whole(lines: list[bytes]) -> Iterator[Progress]:
    """The records that can be read, the last one first."""
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError):
            yield Progress(**json.loads(line))


def _forget_old(folder: Path) -> None:
    """Remove runs that are long over. The user names this folder, so it may hold anything else."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(OSError):
                _forget_run(Path(entry.path))


def _forget_run(run: Path) -> None:
    # All by one descriptor, so that a link put there meanwhile leads nowhere.
    opened = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        names = os.listdir(opened)
        if not names or not all(_is_ours(opened, name, run.name) for name in names):
            return
        # The folder's own time does not change while a process appends to its file.
        newest = max(os.stat(name, dir_fd=opened).st_mtime for name in names)
        if time.time() - newest <= _KEPT_S:
            return
        for name in names:
            os.unlink(name, dir_fd=opened)
    finally:
        os.close(opened)
    run.rmdir()


def _is_ours(folder: int, name: str, run: str) -> bool:
    """Whether a file begins with the record of a process of this run, by any version of unisono."""
    if not _FILE_NAME.fullmatch(name):
        return False
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, dir_fd=folder), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return False
        try:
            told = json.loads(file.readline(_LAST_BYTES))
        except ValueError:
            return False
    return isinstance(told, dict) and told.get("run") == run and told.keys() >= _WRITER_KEYS
