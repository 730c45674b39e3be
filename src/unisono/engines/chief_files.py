"""Files of a run of several processes: the chief writes them, the others wait until they are there.

A process that saves to a path that the chief does not save to at the same time is on its own
business, and writes.
"""

from collections.abc import Callable
from typing import Any

from unisono.engines.callback_ranks import is_alone
from unisono.launch.world import World


def write_as_chief(world: World, what: str, write: Callable[[], Any]) -> Any:
    """Write in the chief; elsewhere wait for it, and write only what the chief does not."""
    if is_alone():
        return write()
    # Told apart by how far the program is: a file may be written many times.
    topic = f"{what} at point {world.num_points}"
    if world.is_chief:
        try:
            return write()
        finally:
            world.announce(topic)
    return None if world.wait_for_chief(topic) else write()
