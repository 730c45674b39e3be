"""A job's output as it comes, until the job is over."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from unisono.slurm import cluster
from unisono.slurm.cluster import Status
from unisono.slurm.records import Record, Records, outcome_of

_LOOK_S = 0.3
_ASK_S = 2.0
_LAST_WORDS_S = 1.0
_CHUNK_BYTES = 1 << 16


class Tail:
    """A file that grows, or is not there yet; what is new in it goes to a stream."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path = path
        self._stream = stream
        self._position = 0

    def carry(self) -> bool:
        """Pass on what is new; whether there was any."""
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


def find_out(record: Record, records: Records) -> list[Status]:
    """How a job is, from Slurm; once it is over and forgotten there, from the run's own files."""
    if record.ended:
        return [Status(**told) for told in record.ended]
    found = cluster.statuses(record.job)
    if not found:
        return outcome_of(record)
    if all(status.is_over for status in found):
        records.note_end(record, found)
    return found


def follow(tails: Sequence[Tail], ask: Callable[[], list[Status]]) -> list[Status]:
    """Pass on what files get until the job is over; how it ended."""
    found, asked = ask(), time.monotonic()
    while not all(status.is_over for status in found):
        for tail in tails:
            tail.carry()
        time.sleep(_LOOK_S)
        if time.monotonic() > asked + _ASK_S:
            found, asked = ask(), time.monotonic()
    deadline = time.monotonic() + _LAST_WORDS_S  # A shared file system may show them late.
    while sum(tail.carry() for tail in tails) or time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return found


def tails_of(record: Record, task: str, rank: int | None) -> list[Tail]:
    """The files of a task's output: those of the job, or what one rank printed."""
    if rank is not None:
        return [Tail(record.log_of(task, rank), sys.stdout.buffer)]
    out, err = record.outputs[record.tasks.index(task)]
    streams = (sys.stdout.buffer, sys.stderr.buffer)
    paths = [Path(record.folder, name) for name in dict.fromkeys((out, err))]
    return [Tail(path, stream) for path, stream in zip(paths, streams, strict=False)]
