"""Files of a run of several processes: the chief writes them, the others wait until they are there.

A process that saves to a path that the chief does not save to at the same time is on its own
business, and writes.
"""

from collections.abc import Callable
from typing import Any

import keras

from unisono.engines.hooks import bind
from unisono.launch.world import World

_callbacks = keras.callbacks
# They write files or messages and do nothing to the model.
_ONLY_WRITE = tuple(
    getattr(_callbacks, name)
    for name in ("CSVLogger", "TensorBoard", "RemoteMonitor", "OrbaxCheckpoint")
    if hasattr(_callbacks, name)
)


def write_as_chief(world: World, what: str, write: Callable[[], Any]) -> Any:
    """Write in the chief; elsewhere wait for it, and write only what the chief does not."""
    # Told apart by how far the program is: a file may be written many times.
    topic = f"{what} at point {world.num_points}"
    if world.is_chief:
        try:
            return write()
        finally:
            world.announce(topic)
    return None if world.wait_for_chief(topic) else write()


def for_rank(callbacks: list[Any], world: World) -> list[Any]:
    """The callbacks that run in this process: those that only write run in the chief."""
    if world.is_chief:
        return list(callbacks)
    for callback in callbacks:
        if isinstance(callback, _callbacks.BackupAndRestore):
            # Loading is for all; what it saves and removes are the chief's files.
            bind(callback, "_save_model", _nothing)
            bind(callback, "on_train_end", _nothing)
    return [callback for callback in callbacks if not isinstance(callback, _ONLY_WRITE)]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The chief does it."""
