"""The topology of this process: its rank, the world size, its node. Read once, then frozen.

Variables of `unisono run` come first, then those of torchrun, MPI, Slurm's srun and `TF_CONFIG`. A
program that none of them started is a world of one. Inconsistent variables are an error: a process
that took itself to be alone would train apart from the others, unnoticed.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unisono.errors import LaunchError

JOINED = "UNISONO_JOINED"
"""The id of the process that joined a run; its children inherit the variable and do not join."""
COORDINATOR = "UNISONO_COORDINATOR"

_PREFIX = "UNISONO_"
_SPECIAL_STEP = 0xFFFFFF00
"""From here on Slurm numbers steps that are not an srun of the user: a batch script, a shell."""


@dataclass(frozen=True)
class Topology:
    """The rank of this process in its run, and on its node; `unisono.topology` returns it.

    Args:
        rank: The rank in the run, from 0.
        world_size: The number of processes of the run.
        local_rank: The rank among the processes of this node.
        local_size: The number of processes on this node.
        node: The number of this node, from 0.
        num_nodes: The number of nodes.
        coordinator: `host:port` of the rendezvous server; None where rank 0 chooses it at the
            start.
        launcher: `unisono`, `torchrun`, `openmpi`, `mpich`, `slurm`, `tf_config` or `none`.

    Example:
        >>> Topology(rank=1, world_size=2).is_chief
        False
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    num_nodes: int = 1
    coordinator: str | None = None
    launcher: str = "none"

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files and prints: rank 0 only."""
        return self.rank == 0


_settled: Topology | None = None


def topology() -> Topology:
    """Tell which process of which run this one is.

    It is read once from the variables of `unisono run`, torchrun, MPI, Slurm or `TF_CONFIG`.

    Returns:
        A `Topology`; rank 0 of 1 if no launcher started this process.

    Raises:
        LaunchError: If the variables of a launcher are inconsistent.

    Example:
        >>> topology().is_chief
        True
    """
    return _settled or settle(read_topology(os.environ))


def settle(facts: Topology) -> Topology:
    """Fix what `topology()` returns from now on: the environment is read once."""
    global _settled
    _settled = facts
    return facts


def read_topology(env: Mapping[str, str]) -> Topology:
    """The topology by a launcher's variables; LaunchError where they are inconsistent."""
    if env.get(JOINED, str(os.getpid())) != str(os.getpid()):
        return Topology()  # A child of a process of the run.
    for launcher, read in _READERS.items():
        facts = read(_Variables(env, launcher))
        if facts is not None:
            return _checked(facts)
    return Topology()


class _Variables:
    """The environment, read as numbers, with errors that name the variable."""

    def __init__(self, env: Mapping[str, str], launcher: str) -> None:
        self.env = env
        self.launcher = launcher

    def has(self, *names: str) -> bool:
        return all(self.env.get(name) for name in names)

    def number(self, name: str, default: int | None = None) -> int:
        text = self.env.get(name, "").strip()
        if not text and default is not None:
            return default
        if not text:
            raise self.error(f"{name} is not set, though others of its variables are")
        if not text.isascii() or not text.isdigit():
            raise self.error(f"{name}={text!r} is not a whole number from 0")
        return int(text)

    def error(self, what: str) -> LaunchError:
        return LaunchError(
            f"Read this process' place in its run from the variables of {self.launcher}; {what}. "
            "Start the program by the launcher alone, or unset them all to run it by itself."
        )


def _read_unisono(variables: _Variables) -> Topology | None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "NODE", "NUM_NODES")
    if not any(variables.has(_PREFIX + name) for name in names):
        return None
    return _facts(variables, *(variables.number(_PREFIX + name) for name in names))


def _read_torchrun(variables: _Variables) -> Topology | None:
    # All four, as torch's own `env://` wants them: RANK alone may be anybody's.
    if not variables.has("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        return None
    rank, size = variables.number("RANK"), variables.number("WORLD_SIZE")
    local_rank = variables.number("LOCAL_RANK", 0)
    local_size = variables.number("LOCAL_WORLD_SIZE", 1)
    num_nodes = variables.number("GROUP_WORLD_SIZE", _num_nodes(size, local_size))
    node = variables.number("GROUP_RANK", _node(rank, local_rank, local_size, num_nodes))
    return _facts(variables, rank, size, local_rank, local_size, node, num_nodes)


def _read_open_mpi(variables: _Variables) -> Topology | None:
    prefix = "OMPI_COMM_WORLD_"
    if not variables.has(f"{prefix}RANK"):
        return None
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return _mpi(variables, *(variables.number(prefix + name) for name in names))


def _read_mpich(variables: _Variables) -> Topology | None:
    if not variables.has("PMI_RANK", "PMI_SIZE"):
        return None
    rank, size = variables.number("PMI_RANK"), variables.number("PMI_SIZE")
    if is_slurm_task(variables.env) and variables.number("SLURM_PROCID") == rank:
        return None  # srun --mpi=pmi2, and Slurm says more than PMI does.
    if size == 1:
        return _mpi(variables, rank, 1, 0, 1)
    local = (variables.number(name) for name in ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"))
    return _mpi(variables, rank, size, *local)


def _read_slurm(variables: _Variables) -> Topology | None:
    if not is_slurm_task(variables.env):
        return None
    size = variables.number("SLURM_STEP_NUM_TASKS", variables.number("SLURM_NTASKS", 1))
    if size == 1:
        return None  # A shell, or one program that srun started: it may start a run of its own.
    node = variables.number("SLURM_NODEID")
    num_nodes = variables.number("SLURM_STEP_NUM_NODES", variables.number("SLURM_NNODES", 1))
    rank, local_rank = variables.number("SLURM_PROCID"), variables.number("SLURM_LOCALID")
    tasks = _tasks_of_node(variables, node)
    return _facts(variables, rank, size, local_rank, tasks, node, num_nodes)


def _read_tf_config(variables: _Variables) -> Topology | None:
    text = variables.env.get("TF_CONFIG", "").strip()
    if not text:
        return None
    addresses, rank = _tf_cluster(variables, text)
    if not addresses:
        return None
    hosts = [address.rpartition(":")[0] for address in addresses]
    nodes = list(dict.fromkeys(hosts))
    local = [i for i, host in enumerate(hosts) if host == hosts[rank]]
    return _facts(
        variables,
        rank,
        len(hosts),
        local.index(rank),
        len(local),
        nodes.index(hosts[rank]),
        len(nodes),
    )


_READERS: dict[str, Callable[[_Variables], Topology | None]] = {
    "unisono": _read_unisono,
    "torchrun": _read_torchrun,
    "openmpi": _read_open_mpi,
    "mpich": _read_mpich,
    "slurm": _read_slurm,
    "tf_config": _read_tf_config,
}


def _facts(
    variables: _Variables,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    node: int,
    num_nodes: int,
) -> Topology:
    # Another launcher's coordinator is not our rendezvous server: only UNISONO_COORDINATOR is.
    coordinator = variables.env.get(COORDINATOR) or None
    launcher = variables.launcher
    return Topology(rank, size, local_rank, local_size, node, num_nodes, coordinator, launcher)


def _checked(facts: Topology) -> Topology:
    pairs = (
        ("rank", facts.rank, "world size", facts.world_size),
        ("local rank", facts.local_rank, "local size", facts.local_size),
        ("node", facts.node, "number of nodes", facts.num_nodes),
        ("local size", facts.local_size - 1, "world size", facts.world_size),
        ("number of nodes", facts.num_nodes - 1, "world size", facts.world_size),
    )
    for name, index, of, count in pairs:
        if not index < count:
            found = index + 1 if name in ("local size", "number of nodes") else index
            raise LaunchError(
                f"The variables of {facts.launcher} say {name} {found} and {of} {count}, which "
                "cannot be. Start all processes of the run by one launcher, with the same numbers."
            )
    return facts


def _mpi(variables: _Variables, rank: int, size: int, local_rank: int, local_size: int) -> Topology:
    if not local_size:
        raise variables.error("no process is said to be on this node")
    num_nodes = _num_nodes(size, local_size)
    node = _node(rank, local_rank, local_size, num_nodes)
    return _facts(variables, rank, size, local_rank, local_size, node, num_nodes)


def _num_nodes(size: int, local_size: int) -> int:
    return -(-size // max(1, local_size))


def _node(rank: int, local_rank: int, local_size: int, num_nodes: int) -> int:
    """The node, where the launcher does not say: ranks fill nodes in turn, or go round them."""
    if rank % max(1, local_size) != local_rank and rank // num_nodes == local_rank:
        return rank % num_nodes
    return min(rank // max(1, local_size), num_nodes - 1)


def is_slurm_task(env: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task; a batch script has most variables as well."""
    if not all(env.get(f"SLURM_{name}") for name in ("STEP_ID", "PROCID", "LOCALID", "NODEID")):
        return False
    step = env["SLURM_STEP_ID"]
    return not step.isdigit() or int(step) < _SPECIAL_STEP


def _tasks_of_node(variables: _Variables, node: int) -> int:
    """The entry of a list such as `4(x2),3`."""
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    name = next((name for name in names if variables.has(name)), names[0])
    counts: list[int] = []
    for part in variables.env.get(name, "").split(","):
        count, _, times = part.strip().rstrip(")").partition("(x")
        if not count.isdigit() or not (times or "1").isdigit():
            raise variables.error(f"{name}={variables.env.get(name)!r} is not a list of counts")
        counts += [int(count)] * int(times or 1)
    if node >= len(counts):
        raise variables.error(f"{name} counts {len(counts)} node(s), and SLURM_NODEID is {node}")
    return counts[node]


def _tf_cluster(variables: _Variables, text: str) -> tuple[list[str], int]:
    """The addresses of all training processes, the chief's first, and this one's place."""
    try:
        config: Any = json.loads(text)
        cluster, task = config.get("cluster") or {}, config.get("task") or {}
        groups = {kind: [str(a) for a in cluster.get(kind, [])] for kind in ("chief", "worker")}
        kind, index = str(task.get("type", "worker")), int(task.get("index", 0))
    except (ValueError, TypeError, AttributeError) as error:
        raise variables.error(f"TF_CONFIG is not what TensorFlow expects: {error}") from error
    addresses = groups["chief"] + groups["worker"]
    if not addresses:
        return [], 0
    if kind not in groups:
        raise variables.error(
            f"TF_CONFIG makes this process a {kind!r}: unisono trains with a chief and workers"
        )
    if not 0 <= index < len(groups[kind]):
        raise variables.error(
            f"TF_CONFIG makes this process {kind} {index}, and names {len(groups[kind])} of them"
        )
    return addresses, index + (len(groups["chief"]) if kind == "worker" else 0)
