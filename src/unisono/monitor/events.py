"""Event files of runs: one folder per run of a program, one small file per rank in it.

A record is a line of JSON; the first identifies the writer, the others hold the progress of
training. Every `fit` of a process writes its file anew, and so does a file that has grown long: a
folder is bounded however long the program runs. Writing is best effort, from a thread of its own: a
full disk or a folder that cannot be written to ends the publishing and never the training. A reader
needs nothing of the run but these files, and `UNISONO_RUNS=` switches them off.
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
"""Where the folders of runs are; empty for no event files at all."""

_MAX_BYTES = 1 << 16
_LAST_BYTES = 1 << 13
_KEPT_S = 7 * 24 * 3600
_TOUCH_S = 10.0
_MAX_ENDED = 50
_FILE_NAME = re.compile(r"rank-[0-9]+\.(jsonl|new)")
# What reading a line of somebody else's raises; the last one if it is nested deeply.
_NO_RECORD = (ValueError, TypeError, RecursionError)
_WRITER_KEYS = {"host", "pid", "rank", "world_size", "backend"}
# Letters of /proc for a process' state. One that has ended stays until its parent reaps it.
_ENDED, _STOPPED = frozenset("ZXx"), frozenset("Tt")


@dataclass(frozen=True)
class Writer:
    """The writer of a file: one process of a run."""

    run: str
    host: str
    pid: int
    started: float
    """When the process was started, in clock ticks of the machine: process numbers are reused."""
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
    """Progress of training in one process, at one moment."""

    at: float
    epoch: int
    num_epochs: int | None
    step: int
    num_steps: int | None
    """Of an epoch."""
    samples_per_s: float | None
    steps_per_s: float | None
    input_wait: float | None
    """The fraction of the time in which the step waited for data."""
    loss: float | None
    peer_wait: float | None = None
    """The fraction of the time in which this process waited for others of its run; on CPUs, in
    which it neither computed nor waited for a core or its input."""
    core_wait: float | None = None
    """The fraction of the processor time that this process needed and other programs took."""
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
    """Whether the process is stopped by SIGSTOP, Ctrl-Z or a debugger."""


def runs_folder(env: Mapping[str, str]) -> Path | None:
    """Where event files are written; None where they are off."""
    if FOLDER in env:
        return Path(env[FOLDER]) if env[FOLDER] else None
    base = env.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "unisono" / "runs"


def run_name(seed: int | None = None) -> str:
    """The folder of this process' run: by the run's seed, or by when this process was started.

    Every `fit` of a program has the same, so that a folder stands for a program.
    """
    pid = os.getpid()
    own = f"run-{seed:x}" if seed is not None else f"{pid}-{ticks_of(pid):.0f}"
    return f"{socket.gethostname()}-{own}"


class EventFile:
    """The file of one process. It never raises: what cannot be written is dropped."""

    def __init__(self, folder: Path, writer: Writer) -> None:
        self._writer = writer
        self._file: int | None = None
        self._num_bytes = 0
        self._next_touch = time.monotonic() + _TOUCH_S
        with contextlib.suppress(OSError):
            _remove_old(folder)
        self._path = folder / writer.run / f"rank-{writer.rank}.jsonl"
        self._open()

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def write(self, progress: Progress) -> None:
        if self._num_bytes > _MAX_BYTES:
            self.close()
            self._open()  # Anew: readers want the latest records alone.
        self._append(dataclasses.asdict(progress))
        if time.monotonic() > self._next_touch:
            # Appending does not change the folder's time, by which readers find the newest runs.
            self._next_touch = time.monotonic() + _TOUCH_S
            with contextlib.suppress(OSError):
                os.utime(self._path.parent)
                if self._file is not None and not os.path.samestat(
                    os.fstat(self._file), os.stat(self._path)
                ):
                    # A `fit` inside this one, or beside it, has begun the file anew.
                    self.close()
                    self._open()

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


class RunsReader:
    """Reads the runs of a host again and again, the newest first.

    A run that is over is read once, and older ones than the last few that are over are not read at
    all: thousands of folders of past runs cost a listing.
    """

    def __init__(self, folder: Path | None, host: str | None = None) -> None:
        self._folder = folder
        self._host = host or socket.gethostname()
        self._ended: dict[str, tuple[int, list[RankEvents]]] = {}
        self._alive: set[str] = set()

    def read(self) -> dict[str, list[RankEvents]]:
        """The runs that are alive and the latest that have ended, each with its ranks in order."""
        found: dict[str, list[RankEvents]] = {}
        num_ended = 0
        for name, changed in self._newest_first():
            if num_ended >= _MAX_ENDED and name not in self._alive:
                continue
            when, ranks = self._ended.get(name, (None, []))
            if when != changed:
                ranks = self._read_run(name)
            if any(events.is_alive for events in ranks):
                self._alive.add(name)
            else:
                self._alive.discard(name)
                self._ended[name] = (changed, ranks)
                num_ended += bool(ranks)
            if ranks:
                found[ranks[0].writer.run] = ranks
        return found

    def _newest_first(self) -> list[tuple[str, int]]:
        if self._folder is None:
            return []
        found = []
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir():
                        found.append((entry.name, entry.stat().st_mtime_ns))
        return sorted(found, key=lambda each: each[1], reverse=True)

    def _read_run(self, name: str) -> list[RankEvents]:
        assert self._folder is not None
        return [e for e in read_ranks(self._folder, name) if e.writer.host == self._host]


def read_ranks(folder: Path, run: str) -> list[RankEvents]:
    """The processes of a run that published in a folder, by rank."""
    found = [_read(path) for path in (folder / run).glob("rank-*.jsonl")]
    ranks = [events for events in found if events is not None]
    return sorted(ranks, key=lambda events: events.writer.rank)


def read_runs(folder: Path | None, host: str | None = None) -> dict[str, list[RankEvents]]:
    """The newest runs of a host, by name, with their processes by rank."""
    return RunsReader(folder, host).read()


def ticks_of(pid: int) -> float:
    """When a process was started, in clock ticks of the machine; 0 where it is gone."""
    return process_state(pid)[1]


def process_state(pid: int) -> tuple[str, float]:
    """A process' state, as a letter of /proc, and when it was started; 0 where it is gone."""
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
    except (OSError, *_NO_RECORD):
        return None  # Half written, or by another version.
    last = next(_records(lines), None)
    state, started = process_state(writer.pid)
    is_there = bool(writer.started) and started == writer.started and state not in _ENDED
    is_alive = is_there and not (last is not None and last.is_over)
    return RankEvents(writer, last, is_alive, is_alive and state in _STOPPED)


def _records(lines: list[bytes]) -> Iterator[Progress]:
    """The complete records, the last one first."""
    for line in reversed(lines):
        with contextlib.suppress(*_NO_RECORD):
            yield Progress(**json.loads(line))


def _remove_old(folder: Path) -> None:
    """Remove runs that are long over. The user names this folder, so it may hold anything else."""
    before = time.time() - _KEPT_S
    for entry in os.scandir(folder):
        with contextlib.suppress(OSError):
            is_old = entry.stat(follow_symlinks=False).st_mtime < before
            if is_old and entry.is_dir(follow_symlinks=False):
                _remove_run(Path(entry.path))


def _remove_run(run: Path) -> None:
    # All by one descriptor, so that a link put there meanwhile leads nowhere.
    opened = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        names = os.listdir(opened)
        if not names or not all(_is_ours(opened, name, run.name) for name in names):
            return
        # Earlier versions did not touch the folder while a process appended to its file.
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
            first = json.loads(file.readline(_LAST_BYTES))
        except _NO_RECORD:
            return False
    return isinstance(first, dict) and first.get("run") == run and first.keys() >= _WRITER_KEYS
