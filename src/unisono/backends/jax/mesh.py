"""The mesh of all replicas' devices, of which this process addresses all or, in a run, one.

An array of the mesh is replicated or sharded by rows. In a run of several processes, each holds its
own shard only, and an operation on the array is one of all processes. So such arrays are made and
used by compiled steps, and a program is given arrays of its own device.
"""

import contextlib
import functools
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unisono.backends.jax.devices import devices_of
from unisono.data.feed import Shard
from unisono.devices import Placement
from unisono.errors import PeerLostError, StrategyError
from unisono.launch.client import World, current_world

AXIS = "replica"
_thread = threading.local()
_DENSE = (np.ndarray, np.generic, jax.Array, int, float, bool)
# NCCL adds neither of these.
_NOT_REDUCED = ("bool", "int16", "uint16")
# What collectives on CPUs (gloo) and on GPUs (NCCL) report when another process is gone.
_PEER_ERRORS = ("Gloo ", "gloo/transport", "NCCL operation", "ncclRemoteError", "ncclSystemError")


class ReplicaMesh:
    """State is replicated on every device, a batch is sharded over them if it divides.

    Args:
        devices: One device per replica: all of this process, or one of each process in `ranks`.
        world: The processes of the run, or None in a single process.
        ranks: The processes whose devices these are; they construct the mesh together.
    """

    def __init__(
        self, devices: Sequence[Any], *, world: World | None = None, ranks: Sequence[int] = (0,)
    ) -> None:
        self.devices = list(devices)
        self.world = world
        self.ranks = list(ranks)
        self.size = len(self.devices)
        self.num_processes = len(self.ranks)
        self.position = 0 if world is None else self.ranks.index(world.rank)
        self.own_device = self.devices[self.position]
        self.mesh = Mesh(np.array(self.devices), (AXIS,))
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.split = NamedSharding(self.mesh, PartitionSpec(AXIS))
        self._replicate = jax.jit(lambda x: x, out_shardings=self.replicated)
        if world is not None:
            self._connect(world)

    @property
    def is_cpu(self) -> bool:
        return bool(self.own_device.platform == "cpu")

    @property
    def num_own(self) -> int:
        """How many of the devices this process addresses."""
        return self.size // self.num_processes

    def put(self, value: Any) -> Any:
        """A value that every process has, or an array of the mesh, as a replicated array."""
        if self.num_processes == 1:
            return jax.device_put(value, self.replicated)
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return value if value.is_fully_replicated else self._replicate(value)
        own = jax.device_put(value, self.own_device)
        return jax.make_array_from_single_device_arrays(own.shape, self.replicated, [own])

    def put_rows(self, rows: Any) -> Any:
        """The rows of all processes, the same number of each, as one sharded array."""
        if self.num_processes == 1:
            return jax.device_put(rows, self.split)
        own = jax.device_put(rows, self.own_device)
        shape = (own.shape[0] * self.size, *own.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.split, [own])

    def as_shard(self, batch: Any) -> Shard:
        """A batch of a single process, which is replicated if it does not divide."""
        leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
        num_rows = next((int(leaf.shape[0]) for leaf in leaves if len(leaf.shape)), 0)
        return Shard(batch, num_rows, num_rows % self.size != 0, 0)

    def place(self, shard: Shard) -> Any:
        """A global batch, of which every process has its shard, as arrays of the mesh."""

        def put(leaf: Any) -> Any:
            if leaf is None:
                return None
            is_dense = isinstance(leaf, _DENSE)
            if self.num_processes > 1 and not is_dense:
                raise StrategyError(
                    f"Asked to split a batch with a {type(leaf).__name__} over processes, which "
                    "JAX can do with dense arrays only. Give dense arrays."
                )
            is_split = is_dense and self.is_split(shard, np.shape(leaf))
            return self.put_rows(leaf) if is_split else self.put(leaf)

        return keras.tree.map_structure(put, shard.data)

    def is_split(self, shard: Shard, shape: Sequence[int]) -> bool:
        """Whether a leaf of this shape has this process' rows of the batch, and not all of it."""
        num_own_rows = shard.num_rows // self.num_processes
        return not shard.is_replicated and len(shape) > 0 and shape[0] == num_own_rows

    def divides(self, batch: Any) -> bool:
        """Whether devices compute their own rows of a global batch, as it is seen in a step."""
        leaves = [leaf for leaf in keras.tree.flatten(batch) if getattr(leaf, "ndim", 0)]
        num_rows = leaves[0].shape[0] if leaves else 0
        dense = [leaf for leaf in leaves if isinstance(leaf, _DENSE)]
        is_split = any(np.shape(leaf)[0] == num_rows for leaf in dense)
        return is_split and num_rows % self.size == 0

    def first_of(self, values: Any) -> Any:
        """The first device's copies of arrays that every device has computed, in a step.

        Kernels that add in any order give each device other digits of what XLA takes for one
        replicated array. An all-reduce, since XLA combines those and no broadcasts.
        """

        def pick(x: Any) -> Any:
            is_first = jax.lax.axis_index(AXIS) == 0
            if x.dtype in _NOT_REDUCED:
                return pick(x.astype("int32")).astype(x.dtype)
            # Adding -0.0 keeps every bit, also the sign of a zero.
            nothing = -0.0 if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact) else 0
            chosen = jax.numpy.where(is_first, x, jax.numpy.asarray(nothing, x.dtype))
            return jax.lax.psum(chosen, AXIS)

        leaves, structure = jax.tree.flatten(values)
        chosen = [i for i, leaf in enumerate(leaves) if _is_number(leaf)]
        every = PartitionSpec()
        pick_all = jax.shard_map(
            lambda arrays: [pick(x) for x in arrays],
            mesh=self.mesh,
            in_specs=every,
            out_specs=every,
        )
        for i, first in zip(chosen, pick_all([leaves[i] for i in chosen]), strict=True):
            leaves[i] = first
        return jax.tree.unflatten(structure, leaves)

    def own(self, value: Any) -> Any:
        """This process' data of an array of the mesh; anything else as it is."""
        if _is_of_several_processes(value):
            return value.addressable_data(0)
        return value

    def result(self, value: Any) -> Any:
        """What a step returned, as a program gets it: its own copy of what is replicated."""
        if _is_of_several_processes(value) and value.is_fully_replicated:
            return value.addressable_data(0)
        return value

    def _connect(self, world: World) -> None:
        """Connect the devices' collectives now, while all processes are here.

        Connecting later times out if one process comes half a minute after another.
        """
        world.all_gather("devices", None, self.ranks)
        add = jax.jit(lambda x: x.sum(), out_shardings=self.replicated)
        with peers_watched(), _without_greetings():
            add(self.put_rows(np.ones(1, "int32"))).block_until_ready()


def mesh_of(placement: Placement) -> ReplicaMesh:
    """The mesh of a placement; in a run of several processes they all have to call this."""
    if placement.num_processes > 1:
        return process_mesh(placement.kind)
    return ReplicaMesh(devices_of(placement))


def process_mesh(kind: str | None = None, ranks: Sequence[int] | None = None) -> ReplicaMesh:
    """The mesh of one device of each of these processes, or of all; each has to call this."""
    world = current_world()
    if world is None:
        raise StrategyError(
            "Asked for collectives between processes; this program runs as a single process. Start "
            "it with `unisono run`."
        )
    # Starts the devices, which all processes do together, also those outside of `ranks`.
    found = "cpu" if jax.default_backend() == "cpu" else "gpu"
    chosen = tuple(range(world.size)) if ranks is None else tuple(ranks)
    if world.rank not in chosen:
        raise StrategyError(
            f"Asked rank {world.rank} for collectives of the ranks {list(chosen)}, which it is not "
            "one of. Call them in those ranks only."
        )
    return _process_mesh(world, found if kind is None else kind, chosen)


@functools.cache
def _process_mesh(world: World, kind: str, ranks: tuple[int, ...]) -> ReplicaMesh:
    first: dict[int, Any] = {}
    for device in jax.devices() if kind == "gpu" else jax.devices("cpu"):
        first.setdefault(device.process_index, device)
    return ReplicaMesh([first[rank] for rank in ranks], world=world, ranks=ranks)


@contextlib.contextmanager
def peers_watched() -> Iterator[None]:
    """In a run, raise PeerLostError where a collective fails because another process is gone.

    Steps run asynchronously, so such an error may appear wherever a value is first read.
    """
    if current_world() is None:
        yield
        return
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if any(words in str(error) for words in _PEER_ERRORS):
            raise PeerLostError(
                "A collective operation failed, most likely because another process is gone: "
                f"{error}"
            ) from error
        raise


@contextlib.contextmanager
def tracing_step(mesh: ReplicaMesh | None) -> Iterator[None]:
    """While a step of the replicas is traced: elsewhere a layer's inputs are not on their mesh."""
    before = traced_mesh()
    _thread.mesh = mesh
    try:
        yield
    finally:
        _thread.mesh = before


def traced_mesh() -> ReplicaMesh | None:
    """The mesh of the step that this thread is tracing."""
    mesh: ReplicaMesh | None = getattr(_thread, "mesh", None)
    return mesh


def _is_number(value: Any) -> bool:
    is_key = isinstance(value, jax.Array) and jax.dtypes.issubdtype(
        value.dtype, jax.dtypes.extended
    )
    return isinstance(value, jax.Array) and not is_key


def _is_of_several_processes(value: Any) -> bool:
    is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return is_array and not value.is_fully_addressable


@contextlib.contextmanager
def _without_greetings() -> Iterator[None]:
    """Keep what gloo prints on connecting out of the program's output; pass on all the rest."""
    sys.stdout.flush()
    with tempfile.TemporaryFile() as caught, contextlib.ExitStack() as stack:
        try:
            output = os.dup(1)
        except OSError:
            yield  # There is no output to keep clean.
            return
        stack.callback(os.close, output)
        os.dup2(caught.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(output, 1)
            caught.seek(0)
            for line in caught:
                if not line.startswith(b"[Gloo] Rank"):
                    os.write(1, line)
