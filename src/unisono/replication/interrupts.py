"""Hold Ctrl-C back for as long as a model has no values.

A compiled step of JAX frees the values that it is given and returns new ones. An interrupt that
arrives in between, and most do, as Python sees it when the step returns, would lose both. On
TensorFlow one that arrives while copies of a variable are written leaves a scope open.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Deliver a Ctrl-C at the end of the block; a second one is delivered at once."""
    handler = signal.getsignal(signal.SIGINT)
    # Only the main thread gets them, and only where the program has not said otherwise.
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple[int, Any]] = []

    def hold(number: int, frame: Any) -> None:
        if held:
            held.clear()
            handler(number, frame)
        held.append((number, frame))

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])
