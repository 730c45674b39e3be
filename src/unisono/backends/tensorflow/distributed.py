"""Joins TensorFlow to a run of several processes: its server, and the groups of its collectives.

TensorFlow's multi-worker strategy is made only to start the server by which collectives reach other
processes; models keep plain variables and no strategy's scope is ever entered. It must be made
before TensorFlow starts, so this runs right after its import and must not import Keras.
"""

import ctypes
import functools
import json
import os
import random
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorflow as tf

from unisono.backends.tensorflow.collectives import Group, keys_of
from unisono.backends.tensorflow.files import write_once
from unisono.backends.tensorflow.internals import has_started, pywrap_tfe
from unisono.errors import LaunchError, StartedError, StrategyError
from unisono.launch.client import World, current_world
from unisono.launch.network import split_address
from unisono.launch.source_filter import OnlyFrom, source_addresses
from unisono.log import logger

_CONFIGURATION = "TF_CONFIG"
# Outside of the range from which systems take the ports of outgoing connections.
_PORTS = range(20_000, 32_000)
_FIRST_GROUP_KEY = 1_000_000
_NUM_TRIES = 100
_REUSE_PORT = "TF_GRPC_REUSE_PORT"

_strategy: tf.distribute.Strategy | None = None


def join(world: World) -> None:
    """Start TensorFlow as one of the processes of a run."""
    global _strategy
    if _strategy is not None:
        return
    if has_started():
        raise StartedError(
            f"Asked TensorFlow to join a run of {world.size} processes; it has started alone. Move "
            "`import unisono` above the first line that uses TensorFlow (building a model, making "
            "a tensor or a data set)."
        )
    num_gpus = _show_own_gpu(world)
    cluster, job, task = _cluster(world)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster),
        task_type=job,
        task_id=task,
        rpc_layer="grpc",
        num_accelerators={"GPU": num_gpus},
    )
    hosts = {split_address(each)[0] for addresses in cluster.values() for each in addresses}
    sources = source_addresses(world, hosts)
    _, port = split_address(cluster[job][task])
    try:
        with closed_server(port, sources) as guard:
            _strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    except (tf.errors.OpError, RuntimeError) as error:
        raise LaunchError(
            f"TensorFlow could not join the run as {cluster[job][task]}, rank {world.rank} of "
            f"{world.size}: {error}. If another program has taken that port in between, start the "
            "run again."
        ) from error
    write_once(world)
    if world.is_chief and guard.num_guarded:
        _warn_of_open_servers(is_one_machine=not sources)


def _warn_of_open_servers(is_one_machine: bool) -> None:
    logger.warning(
        "TensorFlow's servers authenticate nobody. Other machines cannot reach those of this run; "
        "other users of %s can, and act with your rights. See SECURITY.md.",
        "this machine" if is_one_machine else "its nodes",
    )


@contextmanager
def closed_server(port: int, sources: Iterable[str] = ()) -> Iterator[OnlyFrom]:
    """While this is entered, TensorFlow's server starts; only loopback and `sources` reach it."""
    with OnlyFrom(sources, port=port) as guard, _starting_without_gil():
        if guard.is_diverted:
            os.environ[_REUSE_PORT] = "1"
        yield guard


@contextmanager
def _starting_without_gil() -> Iterator[None]:
    """Release the GIL while TensorFlow starts its server and waits for the other processes.

    TensorFlow's binding holds it for a second and more, in which the port would be open to all.
    """
    plain = pywrap_tfe.TFE_EnableCollectiveOps
    try:
        pywrap_tfe.TFE_EnableCollectiveOps = _released()
    except (OSError, AttributeError):
        yield  # Another build of TensorFlow: the port is guarded once its server has started.
        return
    try:
        yield
    finally:
        pywrap_tfe.TFE_EnableCollectiveOps = plain


def _released() -> Any:
    """`TFE_EnableCollectiveOps` of TensorFlow's C API, which ctypes calls without the GIL."""
    library = ctypes.CDLL(str(Path(tf.__file__).with_name("libtensorflow_cc.so.2")))
    pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_in.restype, pointer_in.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    pointer = ctypes.c_void_p
    new_status, delete_status = library.TF_NewStatus, library.TF_DeleteStatus
    code_of, message_of, enable = (
        library.TF_GetCode,
        library.TF_Message,
        library.TFE_EnableCollectiveOps,
    )
    new_status.restype, message_of.restype = pointer, ctypes.c_char_p
    for function in (delete_status, code_of, message_of):
        function.argtypes = [pointer]
    enable.argtypes = [pointer, ctypes.c_char_p, ctypes.c_size_t, pointer]

    def enable_collective_ops(context_handle: Any, server: bytes) -> None:
        status = new_status()
        try:
            enable(pointer_in(context_handle, None), server, len(server), status)
            if code := code_of(status):
                message = message_of(status).decode(errors="replace")
                raise tf.errors.OpError(None, None, message, code)
        finally:
            delete_status(status)

    return enable_collective_ops


@functools.cache
def group_of(ranks: tuple[int, ...] | None = None) -> Group:
    """The group of some processes of the run, or of all; this one must be among them."""
    world = current_world()
    if world is None or _strategy is None:
        raise StrategyError(
            "Asked for collectives over processes; this process runs alone. Start the program with "
            "`unisono run`."
        )
    kind = "gpu" if tf.config.get_visible_devices("GPU") else "cpu"
    if ranks is None:
        return Group(world.rank, world.size, _FIRST_GROUP_KEY, kind)
    return Group(ranks.index(world.rank), len(ranks), _shared_key(world, ranks), kind)


def _shared_key(world: World, ranks: Sequence[int]) -> int:
    """A group key that its processes agree on, and no other group has."""
    name = f"tensorflow group {','.join(map(str, ranks))}"
    if world.rank == ranks[0]:
        number = world.add("tensorflow groups", 1)
        world.put(name, str(_FIRST_GROUP_KEY + keys_of(world.size) * number).encode())
    return int(world.get(name))


def _show_own_gpu(world: World) -> int:
    gpus = tf.config.get_visible_devices("GPU")
    if len(gpus) > 1:
        tf.config.set_visible_devices([gpus[world.topology.local_rank % len(gpus)]], "GPU")
    return min(len(gpus), 1)


def _cluster(world: World) -> tuple[dict[str, list[str]], str, int]:
    """The addresses of all processes by job, and this one's job and task index."""
    if world.topology.launcher == "tf_config":
        return _given_cluster(json.loads(os.environ[_CONFIGURATION]), world.rank)
    host = f"[{world.host}]" if ":" in world.host else world.host
    with _free_port() as port:
        addresses: list[str] = world.all_gather("addresses of TensorFlow", f"{host}:{port}")
    return {"worker": addresses}, "worker", world.rank


def _given_cluster(
    configuration: Mapping[str, Any], rank: int
) -> tuple[dict[str, list[str]], str, int]:
    """The processes that train, as another launcher's TF_CONFIG describes them."""
    jobs = {job: list(configuration["cluster"].get(job, ())) for job in ("chief", "worker")}
    cluster = {job: addresses for job, addresses in jobs.items() if addresses}
    places = [(job, i) for job, addresses in cluster.items() for i in range(len(addresses))]
    return cluster, *places[rank]


@contextmanager
def _free_port() -> Iterator[int]:
    """A port for TensorFlow's server, held until all processes know its address.

    On all addresses, since the server always listens on all of them.
    """
    for port in random.SystemRandom().sample(_PORTS, _NUM_TRIES):
        with socket.socket() as holder:
            try:
                holder.bind(("", port))
            except OSError:
                continue
            yield port
            return
    raise LaunchError(
        f"Found no free port for TensorFlow's server among {_NUM_TRIES} between {_PORTS.start} and "
        f"{_PORTS.stop}. End programs that take very many."
    )
