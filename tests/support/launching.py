"""Starts `unisono run` for tests, and sees to it that nothing is left of it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

SCRIPT = Path(__file__).with_name("run_script.py")
FOREIGN = ("UNISONO_", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC_", "MPI_", "TF_", "OMP_", "MKL_")
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
END_S = 5.0
"""How long anything of a run may be there after its end was decided."""
PATIENCE_S = 60.0
"""For what has no limit of its own, on a machine that has a lot to do."""


class Run:
    """A launcher that a test has started; `wait` gives what it printed."""

    def __init__(self, words: Sequence[object], prefix: Sequence[str] = (), **env: str) -> None:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(FOREIGN) and name not in NAMES
        }
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "unisono", "run", *map(str, words)],
            # Tests have more processes than some machines have cores.
            env=inherited | {"UNISONO_OVERSUBSCRIBE": "1"} | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self, timeout_s: float = PATIENCE_S) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"  # Ended, though nobody has asked for its exit code yet.


def ended_within(pids: Iterable[int], timeout_s: float) -> bool:
    pids = list(pids)
    deadline = time.monotonic() + timeout_s
    while any(map(is_running, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def pids_in(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("pid-*")]


def wait_for(folder: Path, *names: str, timeout_s: float = PATIENCE_S) -> None:
    """Wait for files that the processes of a run write."""
    deadline = time.monotonic() + timeout_s
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < deadline, f"no {names} in {list(folder.iterdir())}"
        time.sleep(0.02)


def end_all(pids: Iterable[int]) -> None:
    for pid in pids:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


def listening_ports(pids: Iterable[int]) -> dict[int, set[int]]:
    """The TCP ports on which each process, or one that it started, listens."""
    return {pid: set().union(*map(_ports_of, [pid, *children(pid)])) for pid in pids}


def _ports_of(pid: int) -> set[int]:
    links = (os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink())
    sockets = {link for link in links if link.startswith("socket:")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                found.add(int(words[1].partition(":")[2], 16))
    return found


def children(pid: int) -> list[int]:
    """The processes that one has started and that have not ended."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # Threads come and go.
            found += [int(child) for child in (task / "children").read_text().split()]
    return found
