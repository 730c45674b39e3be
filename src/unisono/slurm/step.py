"""The tasks and GPUs of an srun step, and whether they fit; before any framework is loaded.

A program that srun starts needs one task per GPU; `unisono run` needs one per node. Other numbers
are interpreted with a remark where there is a sensible way; else it is an error that names the line
to change.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from unisono.errors import LaunchError
from unisono.launch.environments import ServerAddress, find, first_host, ports_of
from unisono.launch.network import join_address
from unisono.launch.wire import secret_of_run, shared_secret
from unisono.topology import Topology, is_slurm_task, read_topology

_RUN = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")


@dataclass(frozen=True)
class SlurmStep:
    """One task of an srun."""

    num_nodes: int
    node: int
    num_tasks: int
    """On this node."""
    task: int
    """This one's place among them."""
    num_gpus: int
    """Of this node, in all; 0 where none was asked for."""
    num_seen: int
    """Of them, what this task may use."""
    is_even: bool
    """Whether every node has as many tasks as this one."""
    is_one_a_node: bool
    """Whether no node has more than one."""

    @property
    def is_first(self) -> bool:
        return self.node == 0 and self.task == 0


def read_step(env: Mapping[str, str]) -> SlurmStep | None:
    """The task that this process is; None where srun did not start it."""
    if not is_slurm_task(env):
        return None
    facts = read_topology(env)
    if facts.launcher != "slurm":
        facts = Topology()  # A single task.
    num_gpus = _number(env.get("SLURM_GPUS_ON_NODE", ""))
    seen = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    # Runs of equal numbers, such as `2(x3),1`.
    counts = [_number(part) for part in env.get("SLURM_STEP_TASKS_PER_NODE", "1").split(",")]
    return SlurmStep(
        num_nodes=facts.num_nodes,
        node=facts.node,
        num_tasks=facts.local_size,
        task=facts.local_rank,
        num_gpus=num_gpus,
        num_seen=len(seen) if seen else num_gpus,
        is_even=len(counts) == 1,
        is_one_a_node=max(counts) == 1,
    )


def fit_ranks(facts: Topology, step: SlurmStep) -> tuple[Topology | None, str]:
    """The topology of a task that is a rank itself, None where it is surplus, and a remark.

    LaunchError where tasks and GPUs do not fit.
    """
    tasks, gpus = step.num_tasks, step.num_gpus
    if gpus in (0, tasks) or facts.world_size == 1:
        return facts, ""
    if tasks < gpus:
        raise LaunchError(
            f"Slurm started {tasks} task(s) on this node, which has {gpus} GPUs for the job; a "
            f"task of a run trains on one. Write `srun unisono run script.py`, which starts a "
            f"process for each GPU, with #SBATCH --ntasks-per-node=1; or #SBATCH "
            f"--ntasks-per-node={gpus} for `srun python script.py`."
        )
    if not step.is_even:
        raise LaunchError(
            f"Slurm started {tasks} tasks on this node for {gpus} GPU(s), and other numbers of "
            f"tasks on other nodes. Ask for as many as there are GPUs: #SBATCH "
            f"--ntasks-per-node={gpus}."
        )
    remark = (
        f"Slurm started {tasks} tasks on each node for {gpus} GPU(s). One task for each GPU "
        f"trains, and {tasks - gpus} on each node have nothing to do. Change the batch script: "
        f"#SBATCH --ntasks-per-node={gpus}"
    )
    if step.task >= gpus:
        return None, remark
    rank = step.node * gpus + step.task
    places = {"rank": rank, "world_size": gpus * step.num_nodes, "local_size": gpus}
    return replace(facts, **places), remark  # type: ignore[arg-type]


def launcher_role(step: SlurmStep) -> tuple[str, str]:
    """The role of `unisono run` in a task ("launch", "rank" or "leave"), and a remark."""
    tasks, gpus = step.num_tasks, step.num_gpus
    if step.is_one_a_node:
        return "launch", ""
    if gpus in (0, tasks):
        return "rank", (
            f"Slurm started {tasks} tasks on each node, so each of them is one process of the run. "
            "`unisono run` needs but one on each node: #SBATCH --ntasks-per-node=1"
        )
    if step.num_seen < gpus or not step.is_even:
        raise LaunchError(
            f"Slurm started {tasks} task(s) on this node, each with {step.num_seen} of its {gpus} "
            "GPU(s), and other nodes may have others. Write #SBATCH --ntasks-per-node=1 and "
            f"#SBATCH --gres=gpu:{gpus}, without --gpus-per-task and --gpu-bind."
        )
    remark = (
        f"Slurm started {tasks} tasks on each node for {gpus} GPUs. The first of them starts a "
        "process for each GPU, and the others have nothing to do. Change the batch script: "
        "#SBATCH --ntasks-per-node=1"
    )
    return ("leave" if step.task else "launch"), remark


def remark_on_allocation(env: Mapping[str, str]) -> str:
    """A remark where a launcher runs in a job of several nodes, but not as a task on each."""
    num_nodes = _number(env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES", ""))
    if num_nodes < 2 or is_slurm_task(env):
        return ""
    return (
        f"this job has {num_nodes} nodes, and without srun only this one is used. Write `srun "
        "unisono run script.py`, with #SBATCH --ntasks-per-node=1"
    )


def coordinator(
    step: SlurmStep, env: Mapping[str, str], timeout_s: float
) -> tuple[str, tuple[int, ...], str]:
    """The address of node 0's launcher, and the secret of this run alone.

    The ports are alternatives to that of the address, which the other nodes try as well.
    """
    run = " ".join(["slurm nodes", str(step.num_nodes), *(env.get(name, "") for name in _RUN)])
    host = first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", ""))
    secret = secret_of_run(shared_secret(env), run)
    place = ServerAddress(run, host, ports_of(run))
    if step.node:
        return find(place, secret, timeout_s), (), secret
    first, *others = place.ports
    return join_address(host, first), tuple(others), secret


def _number(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0
