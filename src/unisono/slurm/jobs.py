"""The jobs that unisono submitted: a folder for each, their state, and their output.

Slurm forgets a job some minutes after its end where a cluster keeps no accounting; the record of a
job and the outcome that its run leaves beside the logs answer then.
"""

import dataclasses
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from unisono.errors import LaunchError
from unisono.launch.streams import OUTCOME, log_name
from unisono.slurm import cluster
from unisono.slurm.cluster import Status

_RECORD = "job.json"
_SCRIPT = "batch.sh"


@dataclass(frozen=True)
class Record:
    """A job that was submitted."""

    job: int
    cluster: str
    name: str
    submitted: float
    folder: str
    """Where it was submitted from, and runs."""
    program: tuple[str, ...]
    num_nodes: int
    gpus_per_node: int
    outputs: tuple[tuple[str, str], ...]
    """The files of stdout and stderr, of each task of an array."""
    is_array: bool = False
    sweep: tuple[tuple[str, ...], ...] = ()
    """What each task of an array adds to the program's words."""
    ended: tuple[dict[str, Any], ...] = ()
    """How it ended, once that is known."""

    @property
    def tasks(self) -> list[str]:
        """Slurm's name of the job, or of each task where it is an array of them."""
        if not self.is_array:
            return [str(self.job)]
        return [f"{self.job}_{i}" for i in range(len(self.outputs))]

    def log_folder(self, task: str) -> Path:
        """Where the ranks' own outputs are, and how the run ended."""
        return Path(self.folder, f"{self.name}_{task}")

    def log_of(self, task: str, rank: int) -> Path:
        return self.log_folder(task) / log_name(rank)


class Records:
    """All of them, newest last."""

    def __init__(self, env: Mapping[str, str]) -> None:
        base = env.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        self._folder = Path(base) / "unisono" / "jobs"

    def draft(self, script: str) -> Path:
        """A batch script in a new folder, for Slurm to look at."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=".draft-", dir=self._folder))
            path = folder / _SCRIPT
            path.write_bytes(script.encode(errors="surrogateescape"))
        except OSError as error:
            raise LaunchError(
                f"Wanted to keep the batch script in {self._folder}: {error}. Free some disk "
                "space, or set XDG_STATE_HOME to a folder that can be written to."
            ) from error
        return path

    def drop(self, draft: Path) -> None:
        shutil.rmtree(draft.parent, ignore_errors=True)

    def keep(self, draft: Path, record: Record) -> None:
        """Turn a draft into the record of a job that was submitted."""
        self._write(draft.parent, record)
        folder = self._place(record)
        shutil.rmtree(folder, ignore_errors=True)  # Of a cluster that began to count anew.
        os.replace(draft.parent, folder)

    def note_end(self, record: Record, found: list[Status]) -> Record:
        """Remember how a job ended, which Slurm soon will not."""
        record = dataclasses.replace(record, ended=tuple(map(dataclasses.asdict, found)))
        self._write(self._place(record), record)
        return record

    def find(self, cluster: str, job: int) -> Record:
        path = self._folder / f"{cluster}-{job}" / _RECORD
        try:
            return _read(path)
        except (OSError, ValueError, TypeError) as error:
            known = ", ".join(str(each.job) for each in self.all(cluster)[-5:])
            recent = f"The latest are {known}." if known else "There is none yet."
            raise LaunchError(
                f"Asked for job {job}; it is none that unisono submitted on {cluster} for this "
                f"user. {recent} For other jobs use squeue and scancel."
            ) from error

    def all(self, cluster: str) -> list[Record]:
        found = []
        for path in self._folder.glob(f"{cluster}-*/{_RECORD}"):
            try:
                found.append(_read(path))
            except (OSError, ValueError, TypeError):
                continue  # Half written by one that was killed, or of another version.
        return sorted(found, key=lambda record: record.submitted)

    def _place(self, record: Record) -> Path:
        return self._folder / f"{record.cluster}-{record.job}"

    def _write(self, folder: Path, record: Record) -> None:
        draft = folder / f".{_RECORD}-{os.getpid()}"
        draft.write_text(json.dumps(dataclasses.asdict(record)))
        os.replace(draft, folder / _RECORD)


def expand(pattern: str, **values: str) -> str:
    """The name of a file as Slurm makes it.

    >>> expand("%x_%j.out", x="keras", j="12")
    'keras_12.out'
    """
    return re.sub("%([a-zA-Z])", lambda found: values.get(found[1], found[0]), pattern)


def outcome_of(record: Record) -> list[Status]:
    """How a run ended by its own files, where Slurm has forgotten it."""
    found = []
    for task in record.tasks:
        try:
            fields = json.loads((record.log_folder(task) / OUTCOME).read_text())
            code, seconds = int(fields["code"]), float(fields["seconds"])
        except (OSError, ValueError, KeyError, TypeError):
            found.append(Status(task, "UNKNOWN", 1))
            continue
        elapsed = time.strftime("%H:%M:%S", time.gmtime(seconds))
        found.append(Status(task, "FAILED" if code else "COMPLETED", code, elapsed))
    return found


def _read(path: Path) -> Record:
    fields = json.loads(path.read_text())
    fields |= {key: tuple(fields[key]) for key in ("program", "ended")}
    fields |= {key: tuple(map(tuple, fields[key])) for key in ("outputs", "sweep")}
    return Record(**fields)


_POLL_S = 0.3
_QUERY_S = 2.0
_LAST_OUTPUT_S = 1.0
_CHUNK_BYTES = 1 << 16


class Tail:
    """A growing file, which may not exist yet; new content is copied to a stream."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path = path
        self._stream = stream
        self._position = 0

    def copy(self) -> bool:
        """Copy what is new; whether there was any."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._position:
                    self._position = 0  # Begun anew, by a job that was requeued.
                file.seek(self._position)
                while chunk := file.read(_CHUNK_BYTES):
                    self._stream.write(chunk)
                is_new = file.tell() > self._position
                self._position = file.tell()
        except OSError:
            return False
        self._stream.flush()
        return is_new


def status_of(record: Record, records: Records) -> list[Status]:
    """The state of a job, from Slurm; once it is forgotten there, from the run's own files."""
    if record.ended:
        return [Status(**fields) for fields in record.ended]
    found = cluster.statuses(record.job)
    if not found:
        return outcome_of(record)
    if all(status.is_over for status in found):
        records.note_end(record, found)
    return found


def follow(tails: Sequence[Tail], ask: Callable[[], list[Status]]) -> list[Status]:
    """Copy what is appended to files until the job is over; its final state."""
    found, asked = ask(), time.monotonic()
    while not all(status.is_over for status in found):
        for tail in tails:
            tail.copy()
        time.sleep(_POLL_S)
        if time.monotonic() > asked + _QUERY_S:
            found, asked = ask(), time.monotonic()
    deadline = time.monotonic() + _LAST_OUTPUT_S  # A shared file system may show them late.
    while sum(tail.copy() for tail in tails) or time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return found


def tails_of(record: Record, task: str, rank: int | None) -> list[Tail]:
    """The files of a task's output: those of the job, or what one rank printed."""
    if rank is not None:
        return [Tail(record.log_of(task, rank), sys.stdout.buffer)]
    out, err = record.outputs[record.tasks.index(task)]
    streams = (sys.stdout.buffer, sys.stderr.buffer)
    paths = [Path(record.folder, name) for name in dict.fromkeys((out, err))]
    return [Tail(path, stream) for path, stream in zip(paths, streams, strict=False)]
