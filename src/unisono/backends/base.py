"""The protocol between the public calls and the backends: what each backend implements.

A backend makes a model parallel in place: the object, its class and its variables stay the user's,
and the backend binds its versions of a few trainer methods to that instance. `Framework` is what
can be used before Keras is imported, `Backend` what needs it. Nothing here has behaviour.

How the protocol fits what is to come:

- Gradient buckets reduced during backward are internal to a `ReplicatedModel`: `fit` only knows
  when a step begins and ends.
- No central message between steps: only `ReplicatedModel.feed` communicates before a step. A feed
  that compares checksums by a collective of the backend replaces it without a change here.
- Sources that read only a process' rows: `feed.bounds` says which rows those are; a source that
  is asked for them yields `Shard`s, which feeds pass on as they are.
- Checkpoints independent of the number of replicas: saving goes through Keras' own methods and
  variables, and `random_state` is plain data.
- Sharded state: `checksums` has a row for each replica. A backend with sharded variables gathers
  them before a save, for which `settle` is the call that all processes make together.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from unisono.devices import Grant, Placement, Policy
from unisono.devices.locations import Location
from unisono.replication.framework import FrameworkState

if TYPE_CHECKING:
    from unisono.data.feed import Feed  # Imports Keras.
    from unisono.launch.client import World


@dataclass(frozen=True)
class Build:
    """What an installed framework was built for; None for what it does not have."""

    version: str
    cuda: str | None = None
    rocm: str | None = None
    cudnn: str | None = None
    nccl: str | None = None

    @property
    def is_cpu_only(self) -> bool:
        return self.cuda is None and self.rocm is None


class Framework(FrameworkState, Protocol):
    """A framework under Keras; usable before it, or Keras, is imported."""

    title: str
    """Its name in messages."""
    first_use: str
    """What starts its devices, in words."""
    needs_even_batches: bool
    """Whether a batch that does not divide by the replicas is computed by each of them."""
    cpu_layers: frozenset[str]
    """Names of the cheaper layer computations that it has for CPUs; see devices/cpu_layers.py."""

    def build(self) -> Build:
        """What the installed framework was built for; imports it."""

    def gpu_install(self, cuda: tuple[int, int] | None) -> str:
        """The line that installs its GPU build, for a driver that supports CUDA up to this."""

    def is_kept_from_gpus(self) -> bool:
        """Whether the user's environment tells the framework to use no GPU."""

    def why_too_late(self, module: Any, policy: Policy) -> str | None:
        """What has started and fixed what a policy would set; None while there is time."""

    def set_variables(self, grant: Grant) -> None:
        """Set what the framework reads from the environment."""

    def apply(self, module: Any, grant: Grant) -> None:
        """Set what takes a call; the framework is imported and has not started its devices."""

    def join(self, world: "World") -> None:
        """Join the processes of a run; called right after the framework is imported."""

    def join_keras(self, world: "World") -> None:
        """Prepare Keras for a run; called right after it is imported."""


class ReplicatedModel(Protocol):
    """A model that trains on several replicas."""

    placement: Placement
    sync_batch_norm: bool
    feed: "Feed | None"
    """Splits batches between the processes of a run; None where all replicas are in this one."""

    def settle(self, when: str) -> None:
        """Make all processes take over the chief's values, where no step follows to do it."""

    def release(self) -> None:
        """Give the model back to plain Keras, with its present values."""

    def variable_names(self) -> list[str]:
        """The variables that replicas must agree on, for `checksums`."""

    def checksums(self) -> list[list[int]]:
        """A checksum of each of those variables, for each replica of this process."""


class CustomLoop(Protocol):
    """What a custom training loop needs from a backend.

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
        """What `run` returned on all replicas, concatenated along an axis."""

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """What `run` returned on each replica of this process."""

    def reduce_gradients(self, gradients: Any) -> Any:
        """Gradients of the global batch, from those of a replica's rows; see `Strategy`."""

    def replicate(self, state: Any) -> Any:
        """State of a step, given to every replica."""

    def num_rows(self) -> Any:
        """Rows of the global batch whose step is running, or None outside one."""

    def part_of_sum(self, value: Any) -> Any:
        """Mark a loss that is this replica's summand of a sum over replicas."""

    def num_parts(self) -> int:
        """How many replicas compute one summand each."""


class Collectives(Protocol):
    """Eager collectives over some processes of the run: the backend's tensors in, tensors out.

    Types and shapes must agree between the processes, but for first dimensions where noted.
    """

    rank: int
    """This process' position among them."""
    size: int

    def all_reduce(self, tensors: Sequence[Any], op: str) -> list[Any]:
        """The "sum", "min", "max" or "product" of each over the processes."""

    def all_gather(self, tensor: Any) -> list[Any]:
        """Every process' tensor; first dimensions may differ."""

    def broadcast(self, tensors: Sequence[Any], root: int) -> list[Any]:
        """The tensors of one process, by its position."""

    def reduce_scatter(self, tensor: Any, op: str) -> Any:
        """This process' shard of a reduction's rows; the first have one more where need be."""

    def all_to_all(self, tensor: Any, splits: Sequence[int]) -> tuple[Any, Any]:
        """Send each process so many rows; the rows received, and how many came from each."""

    def barrier(self) -> None:
        """Wait for all of them."""


class Backend(Protocol):
    """One Keras backend's way of running replicas."""

    def num_gpus(self) -> int:
        """How many GPUs the backend sees in this process."""

    def prepare(self, placement: Placement) -> None:
        """Make the devices of a placement available; raises StartedError when it is too late."""

    def replicate(
        self, model: Any, placement: Placement, *, sync_batch_norm: bool
    ) -> ReplicatedModel:
        """Spread a model over the replicas of a placement, in place."""

    def custom_loop(self, placement: Placement) -> CustomLoop:
        """What a custom training loop runs by."""

    def collectives(self, ranks: Sequence[int] | None = None) -> Collectives:
        """Collectives over some processes of the run, or all; StrategyError outside of one."""

    def device_scope(self, placement: Placement) -> AbstractContextManager[None]:
        """Put what Keras computes and creates inside the scope on the one device of a placement."""

    def locate(self, values: Sequence[Any]) -> list[Location | None]:
        """Where tensors and variables live; None for what is neither, or has no value."""

    def log_placement(self, is_on: bool) -> str | None:
        """Print ops with their devices, or stop; a reason in words where the backend can't."""
