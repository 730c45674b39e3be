"""What each process of a node is given: a device, cores, threads, and its place in the run.

Pure functions of what was asked and what the machine has, so that they can be read as a table.
A process has one GPU, or cores of its own: two processes that share all cores are far slower
than two that have half of them each.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.devices import POLICY, REPLICAS, SIMULATED_GPUS, Policy, Selection
from unisono.launch.client import HOST
from unisono.launch.secret import SECRET
from unisono.topology import COORDINATOR, JOINED

TIMEOUT = "UNISONO_TIMEOUT"
START_TIMEOUT = "UNISONO_START_TIMEOUT"
LEGACY = "UNISONO_LEGACY"
"""Tells a process to make old names work before its program runs; `bootstrap.py` reads it."""

TUNABLES = "GLIBC_TUNABLES"

_LIBRARY_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_TENSORFLOW_THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
# XLA counts the cores that it may run on; this is for where it may run on all.
_XLA_THREADS = ("PJRT_NPROC",)
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True)
class Seat:
    """One process' share of its node."""

    env: dict[str, str]
    cores: tuple[int, ...] = ()
    """The cores that it is pinned to; none where it may run on all."""


@dataclass(frozen=True)
class Facts:
    """What a node's launcher knows of the run, once the nodes have met."""

    first_rank: int
    world_size: int
    local_size: int
    node: int
    num_nodes: int
    coordinator: str
    secret: str
    host: str
    """The address at which the processes of this node are reached."""
    interface: str | None
    timeout_s: float
    start_timeout_s: float


def seats(
    num_processes: int,
    *,
    gpus: Selection | None,
    cores: Sequence[int],
    num_cores: int,
    policy: Policy,
    given: Mapping[str, str],
    is_legacy: bool = False,
) -> list[Seat]:
    """Each process' devices, cores and threads.

    `cores` are those that this node's launcher may run on, `num_cores` how many its container
    pays for; `given` is the environment, in which a user's own numbers of threads stand.
    """
    is_on_gpus = gpus is not None and not gpus.is_simulated
    shares = _split(cores, num_processes) if num_cores == len(cores) else []
    threads = policy.cpu_threads or max(1, num_cores // num_processes)
    found = []
    for i in range(num_processes):
        pinned = shares[i] if shares and not is_on_gpus else ()
        env = _threads(policy.cpu_threads or len(pinned) or threads, is_on_gpus, bool(pinned))
        env = {name: value for name, value in env.items() if name not in given}
        env |= {} if is_on_gpus else memory_environment(given)
        if gpus is not None:
            env |= _gpu(gpus, i)
        if policy != Policy():
            # Which GPU it has is said above.
            env[POLICY] = dataclasses.replace(policy, gpus=None).to_text()
        if is_legacy:
            env[LEGACY] = "1"
        found.append(Seat(env, pinned))
    return found


def memory_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Have glibc reuse freed buffers in a process that trains on CPUs, unless a user has chosen."""
    is_chosen = any(name == TUNABLES or name.startswith("MALLOC_") for name in given)
    if is_chosen or "malloc" in given.get("LD_PRELOAD", ""):
        return {}
    settings = {"hugetlb": 1, "mmap_max": 0, "arena_max": 1, "trim_threshold": (1 << 63) - 1}
    return {TUNABLES: ":".join(f"glibc.malloc.{name}={value}" for name, value in settings.items())}


def environment(
    seat: Seat, facts: Facts, local_rank: int, given: Mapping[str, str]
) -> dict[str, str]:
    """The whole environment of one process: what is given, its share, and its place in the run."""
    place = {
        "UNISONO_RANK": facts.first_rank + local_rank,
        "UNISONO_WORLD_SIZE": facts.world_size,
        "UNISONO_LOCAL_RANK": local_rank,
        "UNISONO_LOCAL_SIZE": facts.local_size,
        "UNISONO_NODE": facts.node,
        "UNISONO_NUM_NODES": facts.num_nodes,
        COORDINATOR: facts.coordinator,
        SECRET: facts.secret,
        HOST: facts.host,
        TIMEOUT: f"{facts.timeout_s:g}",
        START_TIMEOUT: f"{facts.start_timeout_s:g}",
        "PYTHONUNBUFFERED": 1,
    }
    # The number of replicas is the number of processes now.
    ours = (REPLICAS, JOINED, POLICY, LEGACY)
    kept = {name: value for name, value in given.items() if name not in ours}
    if facts.interface is not None:
        kept = dict.fromkeys(_INTERFACES, facts.interface) | kept
    return kept | seat.env | {name: str(value) for name, value in place.items()}


def _split(cores: Sequence[int], num_processes: int) -> list[tuple[int, ...]]:
    """Neighbouring cores for each process; nothing where there are not enough of them."""
    if len(cores) < num_processes:
        return []
    bounds = [i * len(cores) // num_processes for i in range(num_processes + 1)]
    return [tuple(cores[first:last]) for first, last in itertools.pairwise(bounds)]


def _threads(count: int, is_on_gpus: bool, is_pinned: bool) -> dict[str, str]:
    names: tuple[str, ...] = _LIBRARY_THREADS
    if not is_on_gpus:
        names += _TENSORFLOW_THREADS if is_pinned else _TENSORFLOW_THREADS + _XLA_THREADS
    return dict.fromkeys(names, str(count))


def _gpu(gpus: Selection, place: int) -> dict[str, str]:
    if gpus.is_simulated:
        return {SIMULATED_GPUS: "1"}
    return {"CUDA_VISIBLE_DEVICES": gpus.names[place]}
