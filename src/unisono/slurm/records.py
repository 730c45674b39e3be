"""The jobs that this user has submitted through unisono: a small folder for each.

Slurm forgets a job minutes after its end, unless the cluster keeps accounts. What is kept here says
where its files are; the run itself leaves there how it ended.
"""

import dataclasses
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import LaunchError
from unisono.launch.output import OUTCOME, log_name
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
                f"Wanted to keep the batch script in {self._folder}: {error}. Make room there, or "
                "set XDG_STATE_HOME to a folder that can be written to."
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
    """How a run ended by its own files, where Slurm does not know any more."""
    found = []
    for task in record.tasks:
        try:
            told = json.loads((record.log_folder(task) / OUTCOME).read_text())
            code, seconds = int(told["code"]), float(told["seconds"])
        except (OSError, ValueError, KeyError, TypeError):
            found.append(Status(task, "UNKNOWN", 1))
            continue
        elapsed = time.strftime("%H:%M:%S", time.gmtime(seconds))
        found.append(Status(task, "FAILED" if code else "COMPLETED", code, elapsed))
    return found


def _read(path: Path) -> Record:
    told = json.loads(path.read_text())
    told |= {key: tuple(told[key]) for key in ("program", "ended")}
    told |= {key: tuple(map(tuple, told[key])) for key in ("outputs", "sweep")}
    return Record(**told)
