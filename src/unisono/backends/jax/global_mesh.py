"""The mesh of a run of several processes: one device of each, and arrays that lie on all of them.

A process holds its own part of such an array only, and may do nothing to it alone: an operation on
it is one of all processes. So arrays of the mesh are made and used inside compiled steps, and what
a program gets to see are arrays of its own device.
"""

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax._src.array import ArrayImpl
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unisono.data.feed import Shard
from unisono.errors import PeerLostError, StrategyError
from unisono.launch.client import World, current_world

AXIS = "replica"
# What the CPU's collectives (gloo) and the GPUs' (NCCL) say when another process is gone.
_ECHOES = ("Gloo ", "gloo/transport", "NCCL operation", "ncclRemoteError", "ncclSystemError")


class WorldMesh:
    """One device of each of some processes."""

    def __init__(self, world: World, kind: str, ranks: Sequence[int]) -> None:
        self.world = world
        self.ranks = list(ranks)
        self.size = len(self.ranks)
        self.position = self.ranks.index(world.rank)
        devices = _first_devices(kind, ranks)
        self.own = devices[self.position]
        self.mesh = Mesh(np.array(devices), (AXIS,))
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.split = NamedSharding(self.mesh, PartitionSpec(AXIS))
        self._replicate = jax.jit(lambda x: x, out_shardings=self.replicated)
        self._connect()

    def put(self, value: Any) -> Any:
        """A value that every process has, as one array of the mesh."""
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return value if value.is_fully_replicated else self._replicate(value)
        own = jax.device_put(value, self.own)
        return jax.make_array_from_single_device_arrays(own.shape, self.replicated, [own])

    def put_rows(self, rows: Any) -> Any:
        """The rows of all processes, each of which has as many, as one array of the mesh."""
        own = jax.device_put(rows, self.own)
        shape = (own.shape[0] * self.size, *own.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.split, [own])

    def place(self, share: Shard) -> Any:
        """A global batch of which every process has its share."""
        num_own = share.num_rows if share.is_replicated else share.num_rows // self.size

        def put(leaf: Any) -> Any:
            if leaf is None:
                return None
            _check_dense(leaf)
            is_split = not share.is_replicated and np.ndim(leaf) > 0 and len(leaf) == num_own
            return self.put_rows(leaf) if is_split else self.put(leaf)

        return keras.tree.map_structure(put, share.data)

    def shown(self, array: Any) -> Any:
        """This process' copy of an array of the mesh that lies whole on each device."""
        return array.addressable_data(0)

    def result(self, value: Any) -> Any:
        """What a step returned, as a program gets it: its own copy where there is a whole one."""
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return self.shown(value) if value.is_fully_replicated else value
        return value

    def _connect(self) -> None:
        """Let the devices' collectives find each other now, when all processes are here.

        Later, one that comes half a minute after another is too late for them.
        """
        self.world.all_gather("devices", None, self.ranks)
        add = jax.jit(lambda x: x.sum(), out_shardings=self.replicated)
        with peers_watched(), _without_greetings():
            add(self.put_rows(np.ones(1, "int32"))).block_until_ready()


def uncommitted(value: Any) -> Any:
    """The same array of one device, which JAX may move to where other arguments of a call lie."""
    if not isinstance(value, jax.Array) or not value.committed:
        return value
    return ArrayImpl(value.aval, value.sharding, [value], committed=False)


def world_mesh(kind: str | None = None, ranks: Sequence[int] | None = None) -> WorldMesh:
    """The mesh of these processes, or of all; every one of them has to ask for it."""
    world = current_world()
    if world is None:
        raise StrategyError(
            "Asked for collectives between processes; this program runs alone. Start it with "
            "`unisono run`."
        )
    # Devices start in all processes together: also in those that are not asked for more.
    found = "cpu" if jax.default_backend() == "cpu" else "gpu"
    chosen = tuple(range(world.size)) if ranks is None else tuple(ranks)
    if world.rank not in chosen:
        raise StrategyError(
            f"Asked rank {world.rank} for collectives of the ranks {list(chosen)}, which it is not "
            "one of. Ask only those."
        )
    return _made(world, found if kind is None else kind, chosen)


@functools.cache
def _made(world: World, kind: str, ranks: tuple[int, ...]) -> WorldMesh:
    return WorldMesh(world, kind, ranks)


@contextlib.contextmanager
def peers_watched() -> Iterator[None]:
    """Tell a collective that failed because another process is gone from a fault of our own."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if is_echo(error):
            raise PeerLostError(
                "A collective operation failed, most likely because another process is gone: "
                f"{error}"
            ) from error
        raise


def is_echo(error: BaseException) -> bool:
    """Whether an error of JAX only says that another process is gone.

    Steps run while the program goes on, so it may appear wherever a value is first read.
    """
    return isinstance(error, (ValueError, RuntimeError)) and any(
        words in str(error) for words in _ECHOES
    )


def _first_devices(kind: str, ranks: Sequence[int]) -> list[Any]:
    first: dict[int, Any] = {}
    for device in jax.devices() if kind == "gpu" else jax.devices("cpu"):
        first.setdefault(device.process_index, device)
    return [first[rank] for rank in ranks]


def _check_dense(leaf: Any) -> None:
    if not isinstance(leaf, (np.ndarray, np.generic, jax.Array, int, float, bool)):
        raise StrategyError(
            f"Asked to share a batch with a {type(leaf).__name__} between processes, which JAX "
            "can only do with dense arrays. Give dense arrays."
        )


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
