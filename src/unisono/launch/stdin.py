"""The standard input of a program in a run: the first process reads it, and all get its lines.

A read is known by where the program makes it, so what the first process asks for alone stays its
own, and the others get the answer to the same question.
"""

import io
import os
import sys
import zlib
from collections.abc import Callable
from typing import Any

from unisono.launch.client import World


class SharedInput(io.TextIOBase):
    """Stands for `sys.stdin` in one process of a run."""

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
            # Else `input` would read from the terminal itself, and the others learn of nothing.
            raise io.UnsupportedOperation("fileno")
        return int(self._plain.fileno())

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(self._plain.encoding)

    def __getattr__(self, name: str) -> Any:
        """The rest (`buffer`, `reconfigure`) is this process' own: empty but in the first."""
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
