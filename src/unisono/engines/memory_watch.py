"""Gives back memory that lies unused while a `fit` runs, where the process keeps what it freed."""

import time
from typing import Any

from unisono.devices.host_memory import Unused

_EVERY_S = 0.05


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
