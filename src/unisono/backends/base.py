"""The seam between the public calls and the backends: what every engine can do.

An engine adopts a model in place: the object, its class and its variables stay the user's; the
engine binds its own versions of a few of the model's methods to that one instance. Nothing here
has behaviour, so that three backends as different as GSPMD in one process, mirrored variables in
one process and a process per replica all fit behind it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from unisono.devices import Placement
from unisono.devices.locations import Location


class Adopted(Protocol):
    """A model that trains on several replicas, as an engine keeps it."""

    placement: Placement
    sync_batch_norm: bool

    def release(self) -> None:
        """Give the model back to plain Keras, with its present values."""

    def variable_names(self) -> list[str]:
        """The variables that replicas must agree on, for `checksums`."""

    def checksums(self) -> list[list[int]]:
        """A checksum of each of those variables, for each replica of this process."""


class CustomLoop(Protocol):
    """What a user's own training loop needs of a backend.

    A step may see one replica's rows (TensorFlow, torch) or the global batch (JAX).
    """

    num_replicas: int

    def begin_epoch(self) -> None:
        """A distributed data set is about to be iterated."""

    def split(self, batch: Any, num_rows: int) -> Any:
        """A global batch as `run` takes it: every replica gets its rows."""

    def end_epoch(self) -> None:
        """A distributed data set has ended."""

    def run(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a step on every replica."""

    def reduce(self, how: str, value: Any, axis: int | None) -> Any:
        """The "sum" or "mean" over replicas of what `run` returned, and over an axis."""

    def gather(self, value: Any, axis: int) -> Any:
        """What `run` returned on all replicas, joined along an axis."""

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """What `run` returned on each replica of this process."""

    def reduce_gradients(self, gradients: Any) -> Any:
        """Gradients of the global batch, from those of a replica's rows; see `Strategy`."""

    def replicate(self, state: Any) -> Any:
        """State of a step, given to every replica."""

    def num_rows(self) -> Any:
        """Rows of the global batch whose step is running, or None outside one."""

    def part_of_sum(self, value: Any) -> Any:
        """Mark a loss that replicas have parts of: sums over replicas give it."""

    def num_parts(self) -> int:
        """How many replicas compute a part each of what a step adds up."""


class Collectives(Protocol):
    """Eager collectives over some processes of the run: the backend's tensors in, tensors out.

    Types and shapes must agree between the processes, but for first dimensions where it says so.
    """

    rank: int
    """This process' place among them."""
    size: int

    def all_reduce(self, tensors: Sequence[Any], op: str) -> list[Any]:
        """The "sum", "min", "max" or "product" of each over the processes."""

    def all_gather(self, tensor: Any) -> list[Any]:
        """Every process' tensor; first dimensions may differ."""

    def broadcast(self, tensors: Sequence[Any], root: int) -> list[Any]:
        """The tensors of one process, by its place."""

    def reduce_scatter(self, tensor: Any, op: str) -> Any:
        """This process' share of a reduction's rows; the first have one more where need be."""

    def all_to_all(self, tensor: Any, splits: Sequence[int]) -> tuple[Any, Any]:
        """Give each process so many rows; the rows received, and how many came from each."""

    def barrier(self) -> None:
        """Wait for all of them."""


class Backend(Protocol):
    """One backend's way of running replicas."""

    backend: str

    def num_gpus(self) -> int:
        """How many GPUs the backend sees in this process."""

    def prepare(self, placement: Placement) -> None:
        """Make the devices of a placement available; raises StartedError when it is too late."""

    def adopt(self, model: Any, placement: Placement, *, sync_batch_norm: bool) -> Adopted:
        """Spread a model over the replicas of a placement, in place."""

    def custom_loop(self, placement: Placement) -> CustomLoop:
        """What a user's own training loop runs by."""

    def collectives(self, ranks: Sequence[int] | None = None) -> Collectives:
        """Collectives over some processes of the run, or all; StrategyError outside of one."""

    def device_scope(self, placement: Placement) -> AbstractContextManager[None]:
        """Put what Keras computes and creates inside the scope on the one device of a placement."""

    def locate(self, values: Sequence[Any]) -> list[Location | None]:
        """Where tensors and variables live; None for what is neither, or has no value."""

    def log_placement(self, is_on: bool) -> str | None:
        """Print ops with their devices, or stop; a reason in words where the backend can't."""
