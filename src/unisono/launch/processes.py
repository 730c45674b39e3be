"""The processes of a run on this node: started as fresh interpreters, watched, and ended.

Each sits in a session of its own, so that a Ctrl-C reaches the launcher alone, which decides; and
what a program starts is in its process' group, and ended with it. The line to a process carries
what the program raised; its end, seen from there, means that the launcher is gone.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unisono.launch.orphan_guard import Guard
from unisono.launch.output import Output
from unisono.launch.plan import Facts, Seat, environment
from unisono.monitor.events import process_state

_BOOTSTRAP = Path(__file__).parent.with_name("bootstrap.py")
# A signal of the kind that no library claims.
_SHOW_STACKS = getattr(signal, "SIGRTMAX", signal.SIGUSR2) - (4 if sys.platform == "linux" else 0)
_STACKS_S = 2.0
_KILL_S = 2.0
_STATES_S = 0.5


class Rank:
    """One process of the run."""

    def __init__(self, rank: int, program: Sequence[str], seat: Seat, env: dict[str, str]) -> None:
        self.rank = rank
        self.report: dict[str, Any] | None = None
        """What the process told before its end."""
        self.code: int | None = None
        """Its exit code, once it has ended; minus the signal's number where one ended it."""
        self.stopped_since: float | None = None
        self._program = program
        self._seat = seat
        self._env = env
        self._told = b""
        self.is_line_open = True

    def start(self, output: Output) -> None:
        self._line, theirs = socket.socketpair()
        self._line.setblocking(False)
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115
        cores = ",".join(map(str, self._seat.cores)) or "-"
        files = [theirs.fileno(), self._stacks.fileno()]
        streams = output.open(self.rank)
        words = [*map(str, files), str(int(_SHOW_STACKS)), cores, *self._program]
        is_fed = self.rank == 0 and sys.stdin is not None and not _is_terminal_of_others(0)
        try:
            self._process = subprocess.Popen(
                [sys.executable, str(_BOOTSTRAP), *words],
                env=self._env,
                pass_fds=files,
                stdin=None if is_fed else subprocess.DEVNULL,
                stdout=streams.stdout,
                stderr=streams.stderr,
                start_new_session=True,
            )
        finally:
            theirs.close()
            streams.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self.code is None

    @property
    def has_made_room(self) -> bool:
        """Whether the process has stopped its training because it was asked to."""
        return self.report is not None and self.report["kind"] == "preempted"

    def fileno(self) -> int:
        return self._line.fileno()

    def look(self) -> None:
        """Take in what the process told, and whether it has ended."""
        self._listen()
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is not None:
            self._listen()  # What it told last may have come in between.
            if (end.si_code, end.si_status) != (os.CLD_EXITED, 0):
                self.signal_group(signal.SIGKILL)
            self.code = self._process.wait()

    def look_at_state(self) -> None:
        """Take in whether somebody has stopped the process."""
        if process_state(self.pid)[0] != "T":
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = time.monotonic()

    def signal(self, number: int) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Also what the program has started; only before the process' number is free again."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def stacks(self) -> str:
        """What the process wrote of its stacks, on request or on a fatal signal."""
        size = os.fstat(self._stacks.fileno()).st_size
        return os.pread(self._stacks.fileno(), size, 0).decode(errors="replace").strip()

    def close(self) -> None:
        self._line.close()
        self._stacks.close()

    def _listen(self) -> None:
        try:
            while data := self._line.recv(1 << 16):
                self._told += data
            self.is_line_open = False
        except BlockingIOError:
            pass
        except ConnectionError:
            self.is_line_open = False
        *lines, self._told = self._told.split(b"\n")
        for line in lines:
            # The first word counts: what comes after an exception is what it led to.
            # Of what makes no sense, as programs can change anything, the exit code says enough.
            with contextlib.suppress(ValueError, RecursionError):
                self.report = self.report or json.loads(line)


def _is_terminal_of_others(file: int) -> bool:
    """Whether a file is a terminal at which somebody types to another program.

    The kernel would stop a process of that terminal's session that reads it then; ours has a
    session of its own, and would take the other's lines.
    """
    try:
        return os.isatty(file) and os.tcgetpgrp(file) != os.getpgrp()
    except OSError:  # A terminal that controls no session of ours: whoever reads it is not stopped.
        return False


class Ranks:
    """All processes of the run on this node."""

    def __init__(
        self,
        program: Sequence[str],
        seats: Sequence[Seat],
        facts: Facts,
        output: Output,
        guard: Guard,
    ) -> None:
        self.output = output
        self._guard = guard
        self._next_states = 0.0
        self._ranks: list[Rank] = []
        try:
            for i, seat in enumerate(seats):
                env = environment(seat, facts, i, os.environ)
                rank = Rank(facts.first_rank + i, program, seat, env)
                rank.start(output)
                self._ranks.append(rank)
                guard.watch(rank.pid)
        except BaseException:
            self.end(signal.SIGKILL, 0)
            raise

    def __iter__(self) -> Any:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def are_alive(self) -> bool:
        return any(rank.is_alive for rank in self._ranks)

    def look(self) -> None:
        """Take in what has happened to the processes."""
        is_due = time.monotonic() > self._next_states
        if is_due:
            self._next_states = time.monotonic() + _STATES_S
        for rank in self._ranks:
            if not rank.is_alive:
                continue
            rank.look()
            if not rank.is_alive:
                self._guard.forget(rank.pid)
            elif is_due:
                rank.look_at_state()

    def signal(self, number: int) -> None:
        for rank in self._ranks:
            rank.signal(number)

    def signal_groups(self, number: int) -> None:
        for rank in self._ranks:
            rank.signal_group(number)

    def collect_stacks(self, meanwhile: Callable[[], None]) -> dict[int, str]:
        """Where every process is in its Python code, thread by thread."""
        asked = [rank for rank in self._ranks if rank.is_alive]
        before = {rank.rank: len(rank.stacks()) for rank in asked}
        self.signal(_SHOW_STACKS)
        self.signal(signal.SIGCONT)  # One that was stopped answers only when it goes on.
        deadline = time.monotonic() + _STACKS_S
        found = dict.fromkeys(before, "")
        while not all(map(_is_whole, found.values())) and time.monotonic() < deadline:
            time.sleep(0.05)
            meanwhile()
            found = {rank.rank: rank.stacks()[before[rank.rank] :].strip() for rank in asked}
        return found

    def end(
        self, number: int, patience_s: float, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """End all: ask by a signal, and kill what is still there after a while."""
        self.signal(number)
        self._await_end(patience_s, meanwhile)
        self.signal_groups(signal.SIGKILL)
        self._await_end(_KILL_S, meanwhile)

    def _await_end(self, timeout_s: float, meanwhile: Callable[[], None]) -> None:
        deadline = time.monotonic() + timeout_s
        while self.are_alive and time.monotonic() < deadline:
            time.sleep(0.02)
            self.look()
            meanwhile()

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


def _is_whole(stacks: str) -> bool:
    """Whether all was written: the main thread comes last, and began in our own file."""
    return stacks.endswith(" in <module>") and str(_BOOTSTRAP) in stacks.splitlines()[-1]
