"""What each process of a node is given: a device, cores, threads, and its rank in the run.

Pure functions of what was asked and what the machine has, so that they can be read as a table. A
process has one GPU and the cores nearest to it, or cores of its own (see cpu_environment.py). The
variables by which a launcher passes its settings on, and their defaults, are defined here alone.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.devices import POLICY, REPLICAS, SIMULATED_GPUS, Policy, Selection
from unisono.errors import LaunchError
from unisono.launch.client import HOST
from unisono.launch.cpu_environment import (
    is_tuned,
    malloc_environment,
    split_cores,
    thread_environment,
)
from unisono.launch.wire import SECRET
from unisono.topology import COORDINATOR, JOINED

TIMEOUT, TIMEOUT_S = "UNISONO_TIMEOUT", 600.0
"""How long a process may keep the others waiting."""
START_TIMEOUT, START_TIMEOUT_S = "UNISONO_START_TIMEOUT", 300.0
"""How long processes and nodes wait for each other at the start."""
LEGACY = "UNISONO_LEGACY"
"""Makes old names work in a process before its program runs; `bootstrap.py` reads it."""

_HIP = "HIP_VISIBLE_DEVICES"
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def timeout_s(env: Mapping[str, str]) -> float:
    return _seconds(env, TIMEOUT, TIMEOUT_S)


def start_timeout_s(env: Mapping[str, str]) -> float:
    return _seconds(env, START_TIMEOUT, START_TIMEOUT_S)


def is_timeout(seconds: float) -> bool:
    """Whether this many seconds can be waited for.

    >>> is_timeout(float("nan"))
    False
    """
    return 0 < seconds < 1e9


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not is_timeout(seconds):
        raise LaunchError(
            f"Found {name}={text!r} in the environment. Set it to a number of seconds above 0, or "
            "unset it."
        )
    return seconds


@dataclass(frozen=True)
class Resources:
    """What one process has of its node."""

    env: dict[str, str]
    cores: tuple[int, ...] = ()
    """The cores that it is pinned to; none where it may run on all."""


@dataclass(frozen=True)
class Facts:
    """What a node's launcher knows of the run, once all nodes have joined."""

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


def assign_resources(
    num_processes: int,
    *,
    gpus: Selection | None,
    cores: Sequence[int],
    num_cores: int,
    policy: Policy,
    given: Mapping[str, str],
    is_legacy: bool = False,
) -> list[Resources]:
    """Each process' devices, cores and threads.

    `cores` are those that this node's launcher may run on, `num_cores` how many its container
    is granted; `given` is the environment, in which a user's own numbers of threads stand.
    """
    is_on_gpus = gpus is not None and not gpus.is_simulated
    is_cpu_tuned = not is_on_gpus and is_tuned(given)
    splits = split_cores(cores, num_processes) if is_cpu_tuned and num_cores == len(cores) else []
    found = []
    for i in range(num_processes):
        pinned = splits[i] if splits else ()
        count = policy.cpu_threads or len(pinned) or max(1, num_cores // num_processes)
        if gpus is not None and is_on_gpus and is_tuned(given):
            pinned = _cores_near(gpus, i, cores)
            count = min(count, len(pinned) or count)
        env = {}
        if is_on_gpus or is_cpu_tuned or policy.cpu_threads:
            env = thread_environment(count, is_on_gpus=is_on_gpus, is_pinned=bool(pinned))
        env = {name: value for name, value in env.items() if name not in given}
        env |= malloc_environment(given) if is_cpu_tuned else {}
        if gpus is not None:
            env |= _gpu(gpus, i, given)
        if policy != Policy():
            # The GPU of the process is set above.
            env[POLICY] = dataclasses.replace(policy, gpus=None).to_text()
        if is_legacy:
            env[LEGACY] = "1"
        found.append(Resources(env, pinned))
    return found


def environment(
    resources: Resources, facts: Facts, local_rank: int, given: Mapping[str, str]
) -> dict[str, str]:
    """The environment of one process: what is given, its resources, and its rank in the run."""
    variables = {
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
    # The number of processes is the number of replicas.
    ours = (REPLICAS, JOINED, POLICY, LEGACY)
    kept = {name: value for name, value in given.items() if name not in ours}
    if facts.interface is not None:
        kept = dict.fromkeys(_INTERFACES, facts.interface) | kept
    return kept | resources.env | {name: str(value) for name, value in variables.items()}


def _gpu(gpus: Selection, local_rank: int, given: Mapping[str, str]) -> dict[str, str]:
    if gpus.is_simulated:
        return {SIMULATED_GPUS: "1"}
    env = {"CUDA_VISIBLE_DEVICES": gpus.names[local_rank]}
    # ROCm reads CUDA's variable too, unless its own is set, which then decides.
    own = [name.strip() for name in given.get(_HIP, "").split(",") if name.strip()]
    return env | ({_HIP: own[local_rank]} if local_rank < len(own) else {})


def _cores_near(gpus: Selection, local_rank: int, cores: Sequence[int]) -> tuple[int, ...]:
    """The cores of a GPU's own socket that this node may use; none where that is all or nothing.

    Processes of one socket share its cores: a core each would starve input pipelines.
    """
    nearest = gpus.cores[local_rank] if gpus.cores else ()
    near = tuple(core for core in cores if core in nearest)
    return near if len(near) < len(cores) else ()
