"""How far steps run ahead of the CPU devices of one process.

XLA both starts steps and runs them on one pool of threads, one a core. When 32 steps are under way
the start of the next one waits in such a thread; the rest may then wait for a device whose part of
a step finds no thread any more. XLA ends such a process after a minute. A few steps ahead are as
fast, and never come to that.
"""

from collections import deque
from typing import Any

import jax

_MOST_STEPS = 8

_under_way: deque[Any] = deque()  # Of all models: they share the devices.


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
    newest = min(arrays, key=lambda array: array.nbytes)
    _under_way.append(newest)
    if len(_under_way) > _MOST_STEPS:
        oldest = _under_way.popleft()
        # One that a later step has taken the memory of cannot be waited for.
        (newest if oldest.is_deleted() else oldest).block_until_ready()
