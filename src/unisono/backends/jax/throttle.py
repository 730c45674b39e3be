"""A deadlock guard: at most eight steps are in flight on CPU devices.

XLA dispatches and runs steps on one thread pool with a thread per core. With 32 steps in flight,
dispatching the next one blocks in such a thread; the others may then wait for a device whose part
of a step finds no free thread, and XLA aborts the process after a minute. Eight steps in flight are
as fast. The trainer and custom training loops share this limit, as they share the devices.
"""

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import jax

_MAX_STEPS = 8
_SMALL_BYTES = 1024

_in_flight: deque[list[Callable[[], Any]]] = deque()
"""For each step, getters of the arrays that it returned."""


def await_turn() -> None:
    """Wait, before a step is dispatched, until few enough are in flight."""
    while len(_in_flight) >= _MAX_STEPS:
        try:
            _wait_for_first([_in_flight.popleft(), *_in_flight])
        except BaseException:
            _in_flight.clear()  # The later ones have failed with it.
            raise


def note_step(outputs: Any, state: Any = None) -> None:
    """Note what a step returned that was just dispatched.

    The next step may free `state`, so it is waited for only if a step returns nothing else.
    """
    arrays = [leaf for leaf in jax.tree.leaves(outputs) if isinstance(leaf, jax.Array)]
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return  # A program is being traced that calls the step.
    if not arrays:
        jax.block_until_ready(state)
        return
    _in_flight.append([_getter(array) for array in arrays])


def forget_steps() -> None:
    """Release what steps returned, since their devices are given up."""
    _in_flight.clear()


def _getter(array: Any) -> Callable[[], Any]:
    """Returns the array, or None if it is large and nobody else has kept it."""
    return (lambda: array) if array.nbytes <= _SMALL_BYTES else weakref.ref(array)


def _wait_for_first(steps: list[list[Callable[[], Any]]]) -> None:
    """Wait for the first step of which there is still an array to wait for."""
    for getters in steps:
        arrays = [array for get in getters if (array := get()) is not None]
        # A later step may have taken over an array's memory.
        if alive := [array for array in arrays if not array.is_deleted()]:
            jax.block_until_ready(alive)
            return
