"""Runs a program in fresh processes that record it: on one device, and on several replicas.

Each run is a process group of its own, which ends with its time limit, with Ctrl-C and with this
process. What the program prints is kept, and shown only where it fails.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from unisono.devices import CLAIMED_REPLICAS, FORCED_REPLICAS, OVERSUBSCRIBE
from unisono.monitor.events import FOLDER as RUNS
from unisono.parallel import FORCED_SYNC
from unisono.verify.records import EXACT, SETTINGS, ProgramRecord, RecordSettings, read_records

_CHILD = Path(__file__).with_name("child.py")
_GRACE_S = 8.0
_PEER_TIMEOUT_S = 60.0
_MOST_OUTPUT = 20_000


@dataclass(frozen=True)
class Variant:
    """One run of the program, and how it differs from what the program asks for."""

    num_replicas: int = 1
    has_processes: bool = False
    is_exact: bool = False
    perturbs: bool = False
    forces_sync: bool = False
    """Whether batch norm is synchronized, also where the program says otherwise."""
    claims: int | None = None
    """How many replicas the program is told that it has."""


@dataclass
class ChildRun:
    """How a run ended, and what it recorded."""

    variant: Variant
    records: list[ProgramRecord] = field(default_factory=list)
    """One for each process, that of rank 0 first."""
    code: int = 0
    has_timed_out: bool = False
    output: str = ""
    """The end of what the program printed."""

    @property
    def record(self) -> ProgramRecord:
        return self.records[0] if self.records else ProgramRecord()

    @property
    def has_failed(self) -> bool:
        return self.has_timed_out or self.code != 0 or not self.records


class Runner:
    """Starts the runs of one program."""

    def __init__(
        self, program: Sequence[str], *, num_steps: int, seed: int, timeout_s: float
    ) -> None:
        self._program = list(program)
        self._num_steps = num_steps
        self._seed = seed
        self._timeout_s = timeout_s

    def run(self, variant: Variant) -> ChildRun:
        """Run the program once; its failure is no error of this call."""
        with tempfile.TemporaryDirectory(prefix="unisono-verify-") as folder:
            output = Path(folder, "output")
            code = None
            with output.open("wb") as file:
                process = subprocess.Popen(
                    self._command(variant),
                    env=self._environment(variant, folder),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                with _ended(process), contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(self._timeout_s)
            text = output.read_bytes()[-_MOST_OUTPUT:].decode(errors="replace")
            return ChildRun(
                variant,
                records=read_records(Path(folder)),
                code=1 if code is None else code,
                has_timed_out=code is None,
                output=text,
            )

    def _command(self, variant: Variant) -> list[str]:
        if not variant.has_processes:
            return [sys.executable, str(_CHILD), *self._program]
        launcher = [sys.executable, "-m", "unisono", "run"]
        count, timeout = str(variant.num_replicas), f"{_PEER_TIMEOUT_S:g}"
        return [*launcher, "--replicas", count, "--timeout", timeout, *self._program]

    def _environment(self, variant: Variant, folder: str) -> dict[str, str]:
        settings = RecordSettings(
            folder=folder,
            num_steps=self._num_steps,
            seed=self._seed,
            is_exact=variant.is_exact,
            perturbs=variant.perturbs,
        )
        env = dict(os.environ)
        env |= {
            SETTINGS: json.dumps(asdict(settings)),
            FORCED_REPLICAS: str(variant.num_replicas),
            OVERSUBSCRIBE: "1",
            RUNS: "",
            "PYTHONHASHSEED": "0",
            "PYTHONUNBUFFERED": "1",
        }
        if variant.is_exact:
            env[EXACT] = "1"
        if variant.claims is not None:
            env[CLAIMED_REPLICAS] = str(variant.claims)
        if variant.forces_sync:
            env[FORCED_SYNC] = "1"
        return env


@contextlib.contextmanager
def _ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """End a process and all of its group when the block is left."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
