"""Standard streams of a run: what processes print is shown or kept, what they read is broadcast.

Rank 0's output is as if it ran alone: its streams are the launcher's own, and where it has to be
written to a file as well, it still sees a terminal if there is one. One thread copies all output,
so that a failure is handled even while a terminal accepts no more text. Rank 0 also reads standard
input; a read is identified by the program's call stack, so that every rank gets the answer to the
same question, and what rank 0 reads alone stays its own.
"""

import collections
import contextlib
import io
import os
import selectors
import sys
import termios
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from unisono.launch.client import World

_KEPT_BYTES = 64 * 1024
_LONGEST_LINE = 64 * 1024

OUTCOME = "outcome.json"
"""How a run ended, beside the outputs of its ranks."""

Sink = Callable[[bytes], None]
Show = Callable[[int, bytes], None]


@dataclass(frozen=True)
class Streams:
    """The files that a process is started with; None for the launcher's own stream."""

    stdout: int | None = None
    stderr: int | None = None

    def close(self) -> None:
        """Close our copies, once the process has its own."""
        for file in {self.stdout, self.stderr} - {None}:
            assert file is not None
            os.close(file)


class Output:
    """The output of all processes of this node."""

    def __init__(
        self,
        *,
        folder: Path | None = None,
        is_all_shown: bool = False,
        show: Show | None = None,
    ) -> None:
        """`folder`: where each rank's output is written, as `rank-0.log` and so on; `show`: what
        takes the output that is shown, with 1 for stdout and 2 for stderr, if not our streams do.
        """
        self._folder = folder
        self._show = show
        self._is_all_shown = is_all_shown
        self._kept: dict[int, _Last] = {}
        self._logs: dict[int, IO[bytes]] = {}
        self._selector = selectors.DefaultSelector()
        # Something to select on while there is no process, and to wake the thread.
        self._awake, self._wake = os.pipe()
        self._selector.register(self._awake, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._asked: collections.deque[threading.Event] = collections.deque()
        self._is_closing = False
        self._thread = threading.Thread(target=self._copy, name="unisono-output", daemon=True)
        self._thread.start()

    def open(self, rank: int) -> Streams:
        """Streams for a process, whose output is copied from then on."""
        last = self._kept[rank] = _Last()
        sinks: list[Sink] = [last.add]
        if self._folder is not None:
            log = self._logs[rank] = open(self._folder / log_name(rank), "wb", buffering=0)  # noqa: SIM115
            sinks.append(log.write)  # type: ignore[arg-type]
        if rank == 0 and self._folder is None and self._show is None:
            return Streams()
        if rank == 0:
            return Streams(*(self._add([*sinks, self._shown(n)], self._ends(n)) for n in (1, 2)))
        if self._is_all_shown:
            lines = [_Lines(f"[rank {rank}] ", self._shown(number)) for number in (1, 2)]
            return Streams(*(self._add([*sinks, each.add], os.pipe(), each) for each in lines))
        both = self._add(sinks, os.pipe())
        return Streams(both, both)

    def catch_up(self, timeout_s: float = 1.0) -> bool:
        """Wait until all is copied that the processes have printed so far; whether it was.

        Not for ever: a terminal may accept no more text.
        """
        is_copied = threading.Event()
        self._asked.append(is_copied)
        os.write(self._wake, b".")
        return is_copied.wait(timeout_s)

    def last_output(self, rank: int) -> str:
        """The end of what a process printed, if it was not shown."""
        if rank == 0 or self._is_all_shown or rank not in self._kept:
            return ""
        return self._kept[rank].text()

    def log_of(self, rank: int) -> str | None:
        return str(self._folder / log_name(rank)) if self._folder is not None else None

    def close(self, timeout_s: float = 1.0) -> None:
        """Copy what is left, but wait no longer: another process may have inherited the pipes."""
        self._is_closing = True
        os.write(self._wake, b".")
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            for log in self._logs.values():
                log.close()
            self._selector.close()
            os.close(self._awake)
            os.close(self._wake)

    def _add(self, sinks: list[Sink], ends: tuple[int, int], last: "_Lines | None" = None) -> int:
        reading, writing = ends
        with self._lock:
            self._selector.register(reading, selectors.EVENT_READ, (sinks, last))
        os.write(self._wake, b".")
        return writing

    def _shown(self, number: int) -> Sink:
        return partial(self._show or _write, number)

    def _ends(self, number: int) -> tuple[int, int]:
        return _like(number) if self._show is None else os.pipe()

    def _copy(self) -> None:
        while not self._is_closing or len(self._selector.get_map()) > 1:
            asked = [self._asked.popleft() for _ in range(len(self._asked))]
            # What they wait for is in the pipes already, and one read takes all of it.
            for key, _ in self._selector.select(timeout=0 if asked else None):
                if key.fd == self._awake:
                    os.read(key.fd, 4096)
                else:
                    self._take(key.fd, *key.data)
            for is_copied in asked:
                is_copied.set()

    def _take(self, file: int, sinks: list[Sink], last: "_Lines | None") -> None:
        try:
            data = os.read(file, 1 << 16)
        except OSError:  # A pseudo-terminal ends like this.
            data = b""
        for sink in sinks:
            # A closed pipe or a full disk must not end the run.
            with contextlib.suppress(OSError):
                if data:
                    sink(data)
                elif last is not None:
                    last.end()
        if not data:
            with self._lock:
                self._selector.unregister(file)
            os.close(file)


def log_name(rank: int) -> str:
    return f"rank-{rank}.log"


class _Last:
    """The end of a text of any length."""

    def __init__(self) -> None:
        self._parts: collections.deque[bytes] = collections.deque()
        self._num_bytes = 0

    def add(self, data: bytes) -> None:
        self._parts.append(data)
        self._num_bytes += len(data)
        while self._num_bytes - len(self._parts[0]) > _KEPT_BYTES:
            self._num_bytes -= len(self._parts.popleft())

    def text(self) -> str:
        return b"".join(list(self._parts)).decode(errors="replace")


class _Lines:
    """Writes whole lines, each with a prefix, so that those of two processes do not mix."""

    def __init__(self, prefix: str, write: Sink) -> None:
        self._prefix = prefix.encode()
        self._write = write
        self._begun = b""

    def add(self, data: bytes) -> None:
        *lines, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > _LONGEST_LINE:
            lines, self._begun = [*lines, self._begun], b""
        self._write(b"".join(map(self._prefixed, lines)))

    def end(self) -> None:
        if self._begun:
            self._write(self._prefixed(self._begun))
            self._begun = b""

    def _prefixed(self, line: bytes) -> bytes:
        # Of a progress bar that writes over itself, the last state is what remains.
        return self._prefix + line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n"


def _write(number: int, data: bytes) -> None:
    """Write to the launcher's own stdout (1) or stderr (2)."""
    view = memoryview(data)
    while view:
        view = view[os.write(number, view) :]


def _like(number: int) -> tuple[int, int]:
    """Two ends of a pipe that looks to the writer like the launcher's own stream."""
    if not os.isatty(number):
        return os.pipe()
    ours, theirs = os.openpty()
    with contextlib.suppress(termios.error, OSError):
        termios.tcsetwinsize(theirs, termios.tcgetwinsize(number))
    settings = termios.tcgetattr(theirs)
    settings[1] &= ~termios.OPOST  # The real terminal turns line feeds into new lines.
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    return ours, theirs


class SharedInput(io.TextIOBase):
    """Replaces `sys.stdin` in one process of a run."""

    def __init__(self, plain: Any, world: World) -> None:
        self._plain = plain
        self._world = world

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        return self._shared(lambda: self._plain.readline(size))

    def read(self, size: int | None = -1, /) -> str:
        return self._shared(lambda: self._plain.read(size))

    def readable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return bool(self._plain.isatty())

    def fileno(self) -> int:
        if self.isatty():
            # Else `input` would read from the terminal itself, past this class.
            raise io.UnsupportedOperation("fileno")
        return int(self._plain.fileno())

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(self._plain.encoding)

    def __getattr__(self, name: str) -> Any:
        """The rest (`buffer`, `reconfigure`) is this process' own: empty except on rank 0."""
        return getattr(self._plain, name)

    def _shared(self, read: Callable[[], str]) -> str:
        line, place = _caller()
        topic = f"input at {line} ({place:08x})"
        if self._world.is_chief:
            text = read()
            self._world.announce(topic, text=text)
            return text
        said = self._world.wait_for_chief(topic)
        if said is None:
            raise EOFError(
                f"Rank {self._world.rank} asked for input at {line}, which rank 0 did not. Ask in "
                "every process: rank 0 reads, and all get the line."
            )
        return str(said["text"])


def _caller() -> tuple[str, int]:
    """The program's line that reads, and a checksum of all calls that led there."""
    frame: Any = sys._getframe()
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    line = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    place = 0
    while frame is not None:
        code = frame.f_code
        step = f"{os.path.basename(code.co_filename)} {code.co_name} {frame.f_lineno}"
        place, frame = zlib.crc32(step.encode(), place), frame.f_back
    return line, place
