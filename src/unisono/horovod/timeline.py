"""Every collective of all ranks as a Chrome trace, written by rank 0.

The other ranks' times arrive with their next request, so a recording needs no collective. Times
are those of each node's clock.
"""

import atexit
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from unisono.horovod.session import session

Span = tuple[float, float]


class Timeline:
    """One open file: a row for each rank and tensor."""

    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = open(path, "w", encoding="utf-8")  # noqa: SIM115 - stays open
        self._rows: dict[tuple[int, str], int] = {}
        self._begin = time.time()
        self._file.write("[")
        self._is_empty = True

    def span(self, rank: int, names: Sequence[str], what: str, span: Span) -> None:
        """What a rank did for some tensors, from one time to another."""
        start, end = span
        if end < self._begin:
            return  # It arrived late, from before this file.
        start = max(start, self._begin)
        at = {"ts": round((start - self._begin) * 1e6), "dur": max(0, round((end - start) * 1e6))}
        for name in names:
            self._write({"name": what, "ph": "X", "pid": rank, "tid": self._row(rank, name), **at})

    def close(self) -> None:
        self._file.write("\n]\n")
        self._file.close()

    def _row(self, rank: int, name: str) -> int:
        if (rank, name) not in self._rows:
            if all(other != rank for other, _ in self._rows):
                self._describe("process_name", f"rank {rank}", rank, 0)
            self._rows[rank, name] = len(self._rows) + 1
            self._describe("thread_name", name, rank, self._rows[rank, name])
        return self._rows[rank, name]

    def _describe(self, what: str, name: str, rank: int, row: int) -> None:
        self._write({"name": what, "ph": "M", "pid": rank, "tid": row, "args": {"name": name}})

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write("\n" if self._is_empty else ",\n")
        self._file.write(json.dumps(event))
        self._file.flush()
        self._is_empty = False


_timeline: Timeline | None = None


def start(path: str) -> None:
    """Open a file, in rank 0; a file that is already open is closed first."""
    global _timeline
    stop()
    if session().rank == 0:
        _timeline = Timeline(path)


def stop() -> None:
    """Close the file, if one is open."""
    global _timeline
    if _timeline is not None:
        _timeline.close()
        _timeline = None


def is_recording() -> bool:
    return _timeline is not None


def record(rank: int, names: Sequence[str], what: str, span: Span) -> None:
    """Write what a rank did, if a file is open."""
    if _timeline is not None:
        _timeline.span(rank, names, what, span)


atexit.register(stop)
