"""How far steps run ahead of the CPU devices of a process.

XLA both starts steps and runs them on one pool of threads, one a core. When 32 steps are under way
the start of the next one waits in such a thread; the rest may then wait for a device whose part of
a step finds no thread any more. XLA ends such a process after a minute. A few steps ahead are as
fast, and never come to that.

A step takes its large buffer before the one ahead of it has given back its own, so steps that come
one upon the other need the memory of two. Of long ones a single one is under way: the next batch is
made ready beside it, and only the moment of handing over is lost.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

_MOST_STEPS = 8
_LONG_S = 0.2
_ENDING_S = 0.003
"""In which a step that has told its results gives back its buffer."""
_SMALL_BYTES = 1024


class _Step(NamedTuple):
    """What was given out and may be under way."""

    began: float
    results: list[Callable[[], Any]]


class _Pace:
    """What waiting for steps has told about them."""

    def __init__(self) -> None:
        self.are_long: bool | None = None  # Until one was waited for.
        self._last_end = 0.0

    def learn(self, step: _Step) -> None:
        """A step has ended right now."""
        now = time.monotonic()
        self.are_long = now - max(step.began, self._last_end) > _LONG_S
        self._last_end = now


# Of all models: they share the devices.
_under_way: deque[_Step] = deque()
_pace = _Pace()


def await_turn() -> None:
    """Wait, before a step is given out, until few enough are under way."""
    while len(_under_way) >= (_MOST_STEPS if _pace.are_long is False else 1):
        try:
            _wait_for_first([_under_way.popleft(), *_under_way])
        except BaseException:
            _under_way.clear()  # The later ones have failed with it.
            raise


def note_step(outputs: Any, state: Any = None) -> None:
    """Note what a step returned that was just given out.

    `state` is what the next step may free, to wait for where a step returns nothing else.
    """
    arrays = [leaf for leaf in jax.tree.leaves(outputs) if isinstance(leaf, jax.Array)]
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return  # A program is being traced that will call the step.
    if not arrays:
        jax.block_until_ready(state)
        return
    _under_way.append(_Step(time.monotonic(), [_noted(array) for array in arrays]))


def forget_steps() -> None:
    """Let go of what steps returned, as their devices are given up."""
    _under_way.clear()


def _noted(array: Any) -> Callable[[], Any]:
    """A way back to an array; a large one is not kept for that."""
    return (lambda: array) if array.nbytes <= _SMALL_BYTES else weakref.ref(array)


def _wait_for_first(steps: list[_Step]) -> None:
    """Wait for the first step of which there is still something to wait for."""
    for step in steps:
        arrays = [array for find in step.results if (array := find()) is not None]
        # A later step may have taken an array's memory.
        if alive := [array for array in arrays if not array.is_deleted()]:
            # One that is over already tells nothing: it may have ended long ago.
            is_over = all(array.is_ready() for array in alive)
            jax.block_until_ready(alive)
            if not is_over:
                _pace.learn(step)
                if _pace.are_long:
                    time.sleep(_ENDING_S)
            return
