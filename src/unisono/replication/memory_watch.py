"""Gives back memory that lies unused in training, where the process keeps what it freed."""

import threading
import time
from typing import Any

from unisono.devices.host_memory import Unused

_EVERY_S = 0.05
_OFTEN_S = 0.02


class GiveBack:
    """Looks before steps whether there is such memory; of very short ones not before each."""

    def __init__(self) -> None:
        self._unused = Unused()
        self._next_look = 0.0

    def begin(self, model: Any) -> None:
        pass

    def before(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        now = time.monotonic()
        if now >= self._next_look:
            self._unused.give_back()
            self._next_look = now + _EVERY_S
        return args

    def after(self, result: Any) -> None:
        pass

    def end(self, error: BaseException | None) -> None:
        pass


class PeakWatch:
    """Looks often while a long step runs, from a thread of its own.

    The C library may put a step's large buffer elsewhere than that of the step before, of which it
    keeps the memory. The step fills its own little by little: when it begins to, there is time to
    give back the other.
    """

    def __init__(self) -> None:
        self._unused = Unused()
        self._end = 0.0
        self._has_begun = threading.Event()
        threading.Thread(target=self._look_often, name="unisono-memory", daemon=True).start()

    def begin(self, seconds: float) -> None:
        """A step has begun which takes about so long."""
        self._end = time.monotonic() + seconds
        self._has_begun.set()

    def _look_often(self) -> None:
        while self._has_begun.wait():
            self._has_begun.clear()
            while time.monotonic() < self._end:
                self._unused.keep_peak()
                time.sleep(_OFTEN_S)
