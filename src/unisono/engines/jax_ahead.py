"""How far steps run ahead of the CPU devices of one process.

XLA both starts steps and runs them on one pool of threads, one a core. When 32 steps are under way
the start of the next one waits in such a thread; the rest may then wait for a device whose part of
a step finds no thread any more. XLA ends such a process after a minute. A few steps ahead are as
fast, and never come to that.
"""

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import jax

_MOST_STEPS = 8
_SMALL_BYTES = 1024

_Step = list[Callable[[], Any]]
_under_way: deque[_Step] = deque()  # Of all models: they share the devices.


def hold_back(outputs: Any, state: Any = None) -> None:
    """Note what a step returned, and wait for one that was some steps before it.

    `state` is what the next step may free, to wait for where a step returns nothing else.
    """
    arrays = [leaf for leaf in jax.tree.leaves(outputs) if isinstance(leaf, jax.Array)]
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return  # A program is being traced that will call the step.
    if not arrays:
        jax.block_until_ready(state)
        return
    _under_way.append([_noted(array) for array in arrays])
    if len(_under_way) > _MOST_STEPS:
        _wait_for_first([_under_way.popleft(), *_under_way])


def forget_steps() -> None:
    """Let go of what steps returned, as their devices are given up."""
    _under_way.clear()


def _noted(array: Any) -> Callable[[], Any]:
    """A way back to an array; a large one is not kept for that."""
    return (lambda: array) if array.nbytes <= _SMALL_BYTES else weakref.ref(array)


def _wait_for_first(steps: list[_Step]) -> None:
    """Wait for the first step of which there is still something to wait for."""
    for step in steps:
        arrays = [array for find in step if (array := find()) is not None]
        # A later step may have taken an array's memory.
        if alive := [array for array in arrays if not array.is_deleted()]:
            jax.block_until_ready(alive)
            return
