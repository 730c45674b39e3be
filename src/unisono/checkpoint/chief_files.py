"""Files of a run of several processes: the chief writes them, the others wait until they are there.

A process that saves to a path that the chief does not save to at the same time is on its own
business, and writes. What fails in the chief is an error in all.
"""

import builtins
from collections.abc import Callable
from typing import Any

from unisono.checkpoint.atomic import output_error_of
from unisono.errors import OutputError
from unisono.launch.client import World
from unisono.replication.callback_ranks import is_alone


def write_as_chief(world: World, what: str, write: Callable[[], Any]) -> Any:
    """Write in the chief; elsewhere wait for it, and write only what the chief does not."""
    if is_alone():
        return write()
    # Told apart by how far the program is: a file may be written many times.
    topic = f"{what} at point {world.num_points}"
    if world.is_chief:
        try:
            result = write()
        except BaseException as error:
            is_output = isinstance(error, OutputError)
            world.announce(topic, error=_kind_of(error), text=str(error), is_output=is_output)
            raise
        world.announce(topic)
        return result
    said = world.wait_for_chief(topic)
    if said is None:
        return write()
    if "error" in said:
        raise _error_of_chief(what, said)
    return None


def _kind_of(error: BaseException) -> str:
    """The built-in class of an error: what another process can catch it as."""
    found = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return found.__name__


def _error_of_chief(what: str, said: dict[str, Any]) -> Exception:
    """The chief's error as it is raised in the other processes, of the same built-in class."""
    text = f"Rank 0 failed in {what}: {said['text']}"
    kind = getattr(builtins, said["error"])
    if said["is_output"]:
        kind = output_error_of(kind)
    try:
        error: Exception = kind(text) if issubclass(kind, Exception) else RuntimeError(text)
    except TypeError:  # Of a class that is made of more than a text.
        error = RuntimeError(text)
    error.is_echo = True  # type: ignore[attr-defined]  # The launcher shows the chief's.
    return error
