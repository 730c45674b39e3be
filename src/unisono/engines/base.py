"""The seam between the public calls and the backends: what every engine can do.

An engine adopts a model in place: the object, its class and its variables stay the user's; the
engine binds its own versions of a few of the model's methods to that one instance. Nothing here
has behaviour, so that three backends as different as GSPMD in one process, mirrored variables in
one process and a process per replica all fit behind it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from unisono.devices import Placement
from unisono.locations import Location


class Adopted(Protocol):
    """A model that trains on several replicas, as an engine keeps it."""

    placement: Placement
    sync_batch_norm: bool

    def release(self) -> None:
        """Give the model back to plain Keras, with its present values."""


class Engine(Protocol):
    """One backend's way of running replicas."""

    backend: str

    def num_gpus(self) -> int:
        """How many GPUs the backend sees in this process."""

    def prepare(self, placement: Placement) -> None:
        """Make the devices of a placement available; raises StartedError when it is too late."""

    def adopt(self, model: Any, placement: Placement, *, sync_batch_norm: bool) -> Adopted:
        """Spread a model over the replicas of a placement, in place."""

    def device_scope(self, placement: Placement) -> AbstractContextManager[None]:
        """Put what Keras computes and creates inside the scope on the one device of a placement."""

    def locate(self, values: Sequence[Any]) -> list[Location | None]:
        """Where tensors and variables live; None for what is neither, or has no value."""

    def log_placement(self, is_on: bool) -> str | None:
        """Print ops with their devices, or stop; a reason in words where the backend can't."""
