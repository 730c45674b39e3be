"""The processes of a run on this node: started as fresh interpreters, watched, and ended.

Each has a session of its own, so that Ctrl-C reaches the launcher alone, which decides; and what a
program starts is in its process' group, and ends with it. A socket pair to each process carries
what the program raised; when it closes, the process knows that its launcher is gone.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from unisono.devices.cpu import num_memory_kills
from unisono.launch.failure import (
    Failure,
    cause_of_code,
    cause_of_report,
    last_output,
    name_of,
    without_ours,
)
from unisono.launch.orphan_reaper import OrphanReaper
from unisono.launch.plan import Facts, Resources, environment
from unisono.launch.preemption_signal import PREEMPTION_SIGNAL
from unisono.launch.streams import Output
from unisono.monitor.events import process_state

_BOOTSTRAP = Path(__file__).parent.with_name("bootstrap.py")
# A real-time signal, which no library claims.
_SHOW_STACKS = getattr(signal, "SIGRTMAX", signal.SIGUSR2) - (4 if sys.platform == "linux" else 0)
_TICK_S = 0.2
_STACKS_S = 2.0
_TERM_S = 2.0  # A process of JAX does not end on SIGTERM.
_KILL_S = 2.0
_STATES_S = 0.5
_MAX_SILENCE_S = 30.0

HEARTBEAT_S = 1.0
"""How often the launchers of a run's nodes send each other a message."""


class LocalProcess:
    """One process of the run."""

    def __init__(self, rank: int, resources: Resources, env: dict[str, str]) -> None:
        self.rank = rank
        self.report: dict[str, Any] | None = None
        """What the process reported before its end."""
        self.code: int | None = None
        """Its exit code, once it has ended; minus the signal's number where one ended it."""
        self.stopped_since: float | None = None
        self.is_connected = True
        self._resources = resources
        self._env = env
        self._received = b""

    def start(self, program: Sequence[str], output: Output) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115
        cores = ",".join(map(str, self._resources.cores)) or "-"
        files = [theirs.fileno(), self._stacks.fileno()]
        streams = output.open(self.rank)
        words = [*map(str, files), str(int(_SHOW_STACKS)), cores, *program]
        has_input = self.rank == 0 and sys.stdin is not None and not _is_background_terminal(0)
        try:
            self._process = subprocess.Popen(
                [sys.executable, str(_BOOTSTRAP), *words],
                env=self._env,
                pass_fds=files,
                stdin=None if has_input else subprocess.DEVNULL,
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
    def is_preempted(self) -> bool:
        """Whether the process has stopped its training because of a preemption."""
        return self.report is not None and self.report["kind"] == "preempted"

    @property
    def has_failed(self) -> bool:
        has_reported = self.report is not None and self.report["kind"] != "ended"
        return not self.is_preempted and (has_reported or bool(self.code))

    @property
    def has_vanished(self) -> bool:
        """Whether it ended without a report, which is a failure only if other processes miss it."""
        return self.code == 0 and self.report is None

    def fileno(self) -> int:
        return self._socket.fileno()

    def poll(self) -> None:
        """Read what the process has reported, and whether it has ended."""
        self._receive()
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is not None:
            self._receive()  # Its last report may have come in between.
            if (end.si_code, end.si_status) != (os.CLD_EXITED, 0):
                self.signal_group(signal.SIGKILL)
            self.code = self._process.wait()

    def poll_state(self) -> None:
        """Read whether the process is stopped by a signal."""
        if process_state(self.pid)[0] != "T":
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = time.monotonic()

    def signal(self, number: int) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Also to what the program has started; only before the process' number is free again."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def stacks(self) -> str:
        """The stacks that the process has written, on request or on a fatal signal."""
        size = os.fstat(self._stacks.fileno()).st_size
        return os.pread(self._stacks.fileno(), size, 0).decode(errors="replace").strip()

    def close(self) -> None:
        self._socket.close()
        self._stacks.close()

    def _receive(self) -> None:
        try:
            while data := self._socket.recv(1 << 16):
                self._received += data
            self.is_connected = False
        except BlockingIOError:
            pass
        except ConnectionError:
            self.is_connected = False
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            # The first report counts: what comes after an exception is its consequence. Where one
            # is malformed, as programs can change anything, the exit code says enough.
            with contextlib.suppress(ValueError, RecursionError):
                self.report = self.report or json.loads(line)


class LocalProcesses:
    """All processes of the run on this node."""

    def __init__(
        self,
        program: Sequence[str],
        resources: Sequence[Resources],
        facts: Facts,
        *,
        output: Output,
        reaper: OrphanReaper,
        host: str,
        interrupt_s: float,
    ) -> None:
        """`interrupt_s`: how long processes have to end after Ctrl-C."""
        self.facts = facts
        self.host = host
        self.silence_s = min(facts.timeout_s, _MAX_SILENCE_S)
        """How long another node may send nothing."""
        self.excused_until = 0.0
        """Until then nobody is late: this process was stopped itself."""
        self._output = output
        self._reaper = reaper
        self._interrupt_s = interrupt_s
        self._num_memory_kills = num_memory_kills()
        self._failed: set[int] = set()
        self._has_consequence = False
        self._last_poll = time.monotonic()
        self._next_states = 0.0
        self._processes: list[LocalProcess] = []
        try:
            for i, each in enumerate(resources):
                env = environment(each, facts, i, os.environ)
                process = LocalProcess(facts.first_rank + i, each, env)
                process.start(program, output)
                self._processes.append(process)
                reaper.watch(process.pid)
        except BaseException:
            self.kill()
            raise

    def __iter__(self) -> Iterator[LocalProcess]:
        return iter(self._processes)

    @property
    def are_alive(self) -> bool:
        return any(process.is_alive for process in self._processes)

    @property
    def are_done(self) -> bool:
        """Whether all have ended, and none of them failed."""
        return all(p.code == 0 or (p.code is not None and p.is_preempted) for p in self._processes)

    @property
    def are_preempted(self) -> bool:
        return any(process.is_preempted for process in self._processes)

    def wait(self, others: Iterable[Any] = ()) -> list[Failure]:
        """Wait briefly for processes or `others` to report; the failures since the last call."""
        files = [p for p in self._processes if p.is_alive and p.is_connected]
        select.select([*files, *others], [], [], _TICK_S)
        now = time.monotonic()
        if now - self._last_poll > self.silence_s / 2:
            self.excused_until = now + 2 * HEARTBEAT_S
        self._last_poll = now
        self._poll()
        found = self._failures([p for p in self._processes if p.has_failed])
        self._has_consequence |= any(failure.kind == "echo" for failure in found)
        if self._has_consequence:
            found = [*self._failures([p for p in self._processes if p.has_vanished]), *found]
        return found

    def preempt(self) -> None:
        """Pass a preemption on to the processes."""
        self._signal(PREEMPTION_SIGNAL)

    def stopped(self) -> dict[int, float]:
        """The ranks that are stopped by a signal, and for how many seconds."""
        now = time.monotonic()
        return {
            p.rank: now - p.stopped_since
            for p in self._processes
            if p.is_alive and p.stopped_since is not None
        }

    def names(self) -> dict[int, str]:
        return {p.rank: name_of(p.rank, self.host, p.pid) for p in self._processes}

    def collect_stacks(self, meanwhile: Callable[[], None]) -> dict[int, str]:
        """The Python stacks of every thread of every process; calls `meanwhile` often."""
        asked = [process for process in self._processes if process.is_alive]
        before = {process.rank: len(process.stacks()) for process in asked}
        self._signal(_SHOW_STACKS)
        self._signal(signal.SIGCONT)  # A stopped process answers only when it continues.
        deadline = time.monotonic() + _STACKS_S
        found = dict.fromkeys(before, "")
        while not all(map(_are_complete, found.values())) and time.monotonic() < deadline:
            time.sleep(0.05)
            meanwhile()
            found = {p.rank: p.stacks()[before[p.rank] :].strip() for p in asked}
        return found

    def end(self, number: int, meanwhile: Callable[[], None]) -> None:
        """End all by a signal, and kill those that are still alive after a while."""
        patience_s = self._interrupt_s if number == signal.SIGINT else _TERM_S
        self._signal(number)
        self._await_end(patience_s, meanwhile)
        self.kill(meanwhile)

    def kill(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """End all at once, with what they have started."""
        self.signal_groups(signal.SIGKILL)
        self._await_end(_KILL_S, meanwhile)

    def signal_groups(self, number: int) -> None:
        for process in self._processes:
            process.signal_group(number)

    def close(self) -> None:
        for process in self._processes:
            process.close()

    def _signal(self, number: int) -> None:
        for process in self._processes:
            process.signal(number)

    def _poll(self) -> None:
        is_due = time.monotonic() > self._next_states
        if is_due:
            self._next_states = time.monotonic() + _STATES_S
        for process in self._processes:
            if not process.is_alive:
                continue
            process.poll()
            if not process.is_alive:
                self._reaper.forget(process.pid)
            elif is_due:
                process.poll_state()

    def _await_end(self, timeout_s: float, meanwhile: Callable[[], None]) -> None:
        deadline = time.monotonic() + timeout_s
        while self.are_alive and time.monotonic() < deadline:
            time.sleep(0.02)
            self._poll()
            meanwhile()

    def _failures(self, processes: Sequence[LocalProcess]) -> list[Failure]:
        new = [process for process in processes if process.rank not in self._failed]
        if new:  # What they have printed may still be in a pipe.
            self._output.catch_up()
        self._failed |= {process.rank for process in new}
        return [self._failure(process) for process in new]

    def _failure(self, process: LocalProcess) -> Failure:
        report = process.report
        if report is not None and report["kind"] != "ended":
            kind, cause, code = cause_of_report(report)
            traceback = str(report["traceback"])
        else:
            assert process.code is not None
            kind, cause, code = cause_of_code(process.code, self._num_memory_kills)
            traceback = without_ours(process.stacks()) if process.stacks() else ""
        return Failure(
            kind,
            cause,
            code,
            process.rank,
            self.facts.node,
            self.host,
            process.pid,
            traceback,
            last_output(self._output.last_output(process.rank), traceback),
            self._output.log_of(process.rank),
        )


def _is_background_terminal(file: int) -> bool:
    """Whether a file is a terminal whose foreground program is another one.

    The kernel would stop a process of that terminal's session that reads it then; ours has a
    session of its own, and would take the other program's lines.
    """
    try:
        return os.isatty(file) and os.tcgetpgrp(file) != os.getpgrp()
    except OSError:  # A terminal that controls no session of ours: whoever reads it is not stopped.
        return False


def _are_complete(stacks: str) -> bool:
    """Whether all was written: the main thread comes last, and began in our own file."""
    return stacks.endswith(" in <module>") and str(_BOOTSTRAP) in stacks.splitlines()[-1]
