"""Run programs as a user does, and see which processes they leave."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TIMEOUT_S = 150


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1", **changes}


def run(*arguments: str, text: str | None = None, cwd: Any = None, **changes: str) -> Any:
    """Run Python to its end, in a session of its own; the result also has its `pid`."""
    process = start(*arguments, cwd=cwd, **changes)
    try:
        out, err = process.communicate(text, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"no end after {TIMEOUT_S} s:\n{out}\n{err}") from None
    done: Any = subprocess.CompletedProcess(arguments, process.returncode, out, err)
    done.pid = process.pid
    return done


def start(*arguments: str, cwd: Any = None, **changes: str) -> "subprocess.Popen[str]":
    """Start Python in a session of its own, with its output in pipes."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(**changes),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Whoever started these tests may ignore it, and then so would Python.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def workers_of(pid: int) -> list[int]:
    """The living worker processes that a process has started."""
    program = b"backends.torch.worker"
    return [child for child in children_of(pid) if program in _read(child, "cmdline")]


def children_of(pid: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and is_alive(int(entry.name)):
            # The name in brackets may contain anything: the fields follow its last bracket.
            fields = _read(int(entry.name), "stat").rpartition(b")")[2].split()
            if fields and int(fields[1]) == pid:
                yield int(entry.name)


def is_alive(pid: int) -> bool:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return bool(fields) and fields[0] != b"Z"


def wait_until_gone(pids: list[int], timeout_s: float) -> list[int]:
    """Those that are still alive after the time."""
    deadline = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def private_bytes(pid: int) -> int:
    """Memory that belongs to this process alone."""
    lines = _read(pid, "smaps_rollup").decode().splitlines()
    fields = (line.split() for line in lines if line.startswith("Private_"))
    return sum(1024 * int(field[1]) for field in fields)


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
