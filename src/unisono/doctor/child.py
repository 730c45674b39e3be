"""Runs one of doctor's programs in a process of its own, with a time limit.

The program writes one JSON record per line to a file as it goes, so that what it found before a
crash or a hang still counts. Its output is only read for the cause of a failure: frameworks print
what they like.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.devices import OVERSUBSCRIBE, SIMULATED_GPUS
from unisono.imports import ANY_VERSION
from unisono.scratch import temporary_folder

_PROGRAMS = "unisono.doctor.programs"
_KEPT = (SIMULATED_GPUS, ANY_VERSION, OVERSUBSCRIBE)
# A launcher's variables are meant for doctor itself, which is one task of a step or none.
_LAUNCHERS = ("UNISONO_", "SLURM_", "PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_")
_LAUNCHER_NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "TF_CONFIG"),
)
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1", "UNISONO_RUNS": ""}
# A check is a guest on a GPU that others may use.
_MODEST = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
FULL_PRECISION = {"NVIDIA_TF32_OVERRIDE": "0", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
"""Switches TF32 off, which rounds to three digits, for results that are compared."""

_ERROR = re.compile(r"\b[A-Za-z_.]*(Error|Exception|Interrupt|Exit)\b: \S")
_MOST_CHARACTERS = 300
_END_S = 5.0


@dataclass(frozen=True)
class Answer:
    """What a program found until its end."""

    records: tuple[Mapping[str, Any], ...]
    seconds: float
    problem: str | None = None
    """Why it did not come to its end."""
    is_late: bool = False
    """Whether its time was over."""
    is_cut: bool = False
    """Whether its time was over and may have been too short: doctor had little left, or the machine
    was busy with other programs."""

    def of(self, stage: str) -> list[Mapping[str, Any]]:
        return [record for record in self.records if record.get("stage") == stage]


def run_child(
    program: str,
    *words: object,
    backend: str,
    limit_s: float,
    replicas: int | None = None,
    env: Mapping[str, str] | None = None,
    cores: Sequence[int] | None = None,
) -> Answer:
    """Run a program of `programs/` to its end, or until the time is over.

    Args:
        program: Its name.
        words: Its arguments, after the file for its records.
        backend: Keras' backend in it.
        limit_s: How long it may take; then it is killed, with all that it has started.
        replicas: Start it by `unisono run` as so many processes.
        env: More variables of its environment.
        cores: The cores that it may run on.
    """
    with temporary_folder() as folder:
        records, output = folder / "records.jsonl", folder / "output"
        launcher = ["run", "--replicas", str(replicas), "--timeout", f"{limit_s:g}"]
        command = [sys.executable, "-m"]
        command += ["unisono", *launcher, "-m"] if replicas is not None else []
        command += [f"{_PROGRAMS}.{program}", str(records), *map(str, words)]
        began, is_late = time.monotonic(), False
        with output.open("wb") as stream:
            process = subprocess.Popen(
                command,
                env=_environment(backend) | dict(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
            try:
                if cores is not None:
                    # At once: the interpreter takes longer than this to count its cores.
                    with contextlib.suppress(OSError):
                        os.sched_setaffinity(process.pid, cores)
                code = process.wait(limit_s)
                problem = None if code == 0 else _cause(code, output)
            except subprocess.TimeoutExpired:
                problem, is_late = f"did not end within {limit_s:.0f} s", True
            finally:
                _end(process)
        return Answer(_read(records), time.monotonic() - began, problem, is_late)


def _environment(backend: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or not (name.startswith(_LAUNCHERS) or name in _LAUNCHER_NAMES)
    }
    return _QUIET | _MODEST | kept | {"KERAS_BACKEND": backend, "UNISONO_RUNS": ""}


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a program and what it has started; `unisono run` ends its processes by itself."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(path: Path) -> tuple[Mapping[str, Any], ...]:
    found = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # The last one may be cut off.
                found.append(json.loads(line))
    return tuple(found)


def _cause(code: int, output: Path) -> str:
    """The error that a program ended with, in one line."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.strip() for line in lines if _ERROR.search(line)]
    if errors:
        return f"failed with {errors[-1][:_MOST_CHARACTERS]}"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"ended with exit code {code}" + (f": {last[:_MOST_CHARACTERS]}" if last else "")
