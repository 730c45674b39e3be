"""Environments of processes as launchers set them, and processes started with such ones."""

import json
import os
import subprocess
import sys

from launching import FOREIGN, NAMES

SECRET = {"UNISONO_SECRET": "known to all nodes"}
OURS = {
    "UNISONO_RANK": "3",
    "UNISONO_WORLD_SIZE": "6",
    "UNISONO_LOCAL_RANK": "0",
    "UNISONO_LOCAL_SIZE": "3",
    "UNISONO_NODE": "1",
    "UNISONO_NUM_NODES": "2",
    "UNISONO_COORDINATOR": "10.0.0.1:4000",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
# Of a batch script of a job with four tasks, as sbatch sets them.
BATCH = {
    "SLURM_JOB_ID": "17",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "n[1-2]",
}
SRUN = BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
SHELL = BATCH | {"SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_STEP_NUM_TASKS": "1"}
# srun starts torchrun's agent, or MPI's, once a node.
AGENT = SRUN | {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}


def tf_config(kind: str | None, index: int = 0, **cluster: list[str]) -> dict[str, str]:
    task = {"task": {"type": kind, "index": index}} if kind else {}
    return {"TF_CONFIG": json.dumps({"cluster": cluster} | task)}


def task(
    tasks: str, gpus: int, *, nodes: int = 2, node: int = 0, local: int = 0, seen=None
) -> dict:
    """The variables of a task on one of some nodes, with `tasks` such as `2(x2)`."""
    each = int(tasks.split("(")[0].split(",")[0])
    total = sum(
        int(part.split("(x")[0]) * int(part.rstrip(")").split("(x")[1] if "(x" in part else 1)
        for part in tasks.split(",")
    )
    numbers = {
        "SLURM_PROCID": node * each + local,
        "SLURM_LOCALID": local,
        "SLURM_NODEID": node,
        "SLURM_STEP_NUM_TASKS": total,
        "SLURM_STEP_NUM_NODES": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
    }
    if gpus:
        numbers["SLURM_GPUS_ON_NODE"] = gpus
        numbers["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(seen or gpus)))
    return SRUN | {name: str(value) for name, value in numbers.items()}


def of_node(num_nodes: int, node: int, port: int) -> list[object]:
    place = ["--nodes", num_nodes, "--node-rank", node]
    return [*place, "--coordinator", f"127.0.0.1:{port}"]


SCRIPT = """
import json, os, unisono
from unisono.launch.client import current_world
facts, world = unisono.topology(), current_world()
ranks = world.all_gather("who", facts.rank)
line = json.dumps([facts.launcher, ranks, facts.coordinator, world.host])
os.write(1, (line + chr(10)).encode())  # At once, as another process may write to the same pipe.
"""
TORCH = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
ONE_NODE = {
    "torchrun": lambda rank: TORCH | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
    "openmpi": lambda rank: {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "prterun-1",
    },
    "mpich": lambda rank: MPICH | {"PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank)},
    "slurm": lambda rank: (
        SRUN
        | {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NODEID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_TASKS_PER_NODE": "2",
        }
    ),
    "tf_config": lambda rank: tf_config("worker", rank, worker=["a:1", "a:2"]),
}


def start(folder, env, script=SCRIPT) -> subprocess.Popen:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(FOREIGN) and name not in NAMES
    }
    inherited |= {"TMPDIR": str(folder), "XDG_RUNTIME_DIR": "", "HOME": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=inherited | {"UNISONO_START_TIMEOUT": "30"} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told(processes) -> list:
    ends = [process.communicate(timeout=60) for process in processes]
    assert all(process.returncode == 0 for process in processes), ends
    return [json.loads(out) for out, _ in ends]
