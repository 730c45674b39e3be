"""Who a process is, as each launcher's variables say it: a table of environments."""

import os

import pytest
from launcher_variables import AGENT, BATCH, MPICH, OPEN_MPI, OURS, SHELL, SRUN, TORCHRUN, tf_config

from unisono import topology as ask
from unisono.errors import LaunchError
from unisono.topology import JOINED, Topology, read_topology

WORKERS = ["a:1", "a:2", "b:1"]
CASES = {
    "nobody": ({}, (0, 1, 0, 1, 0, 1), "none"),
    "ours": (OURS, (3, 6, 0, 3, 1, 2), "unisono"),
    "ours inside of all others": (
        OURS | TORCHRUN | OPEN_MPI | MPICH | SRUN | tf_config("worker", 1, worker=WORKERS),
        (3, 6, 0, 3, 1, 2),
        "unisono",
    ),
    "torchrun": (TORCHRUN, (5, 8, 1, 4, 1, 2), "torchrun"),
    "torchrun under srun": (AGENT | TORCHRUN, (5, 8, 1, 4, 1, 2), "torchrun"),
    "torch's variables, one process a node": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        (1, 2, 0, 1, 1, 2),
        "torchrun",
    ),
    "a rank of somebody else's": ({"RANK": "x", "WORLD_SIZE": "2"}, (0, 1, 0, 1, 0, 1), "none"),
    "Open MPI": (OPEN_MPI, (2, 4, 0, 2, 1, 2), "openmpi"),
    "Open MPI, round the nodes": (
        OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        (2, 4, 1, 2, 0, 2),
        "openmpi",
    ),
    "Open MPI under srun": (AGENT | OPEN_MPI, (2, 4, 0, 2, 1, 2), "openmpi"),
    "Open MPI, one process": (
        {
            f"OMPI_COMM_WORLD_{name}": value
            for name, value in zip(
                ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), "0101", strict=True
            )
        },
        (0, 1, 0, 1, 0, 1),
        "openmpi",
    ),
    "MPICH": (MPICH, (1, 2, 1, 2, 0, 1), "mpich"),
    "MPICH, one process": ({"PMI_RANK": "0", "PMI_SIZE": "1"}, (0, 1, 0, 1, 0, 1), "mpich"),
    "MPICH under srun": (AGENT | {"SLURM_PROCID": "0"} | MPICH, (1, 2, 1, 2, 0, 1), "mpich"),
    "srun": (SRUN, (3, 4, 1, 2, 1, 2), "slurm"),
    "srun with PMI": (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4, 1, 2, 1, 2), "slurm"),
    "srun, nodes of different size": (
        SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"},
        (3, 4, 0, 1, 1, 2),
        "slurm",
    ),
    "a batch script": (BATCH, (0, 1, 0, 1, 0, 1), "none"),
    "a shell in an allocation": (SHELL, (0, 1, 0, 1, 0, 1), "none"),
    "one task of srun": (
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        (0, 1, 0, 1, 0, 1),
        "none",
    ),
    "TF_CONFIG": (tf_config("worker", 2, worker=WORKERS), (2, 3, 0, 1, 1, 2), "tf_config"),
    "TF_CONFIG, same host": (
        tf_config("worker", 1, worker=WORKERS),
        (1, 3, 1, 2, 0, 2),
        "tf_config",
    ),
    "TF_CONFIG with a chief": (
        tf_config("worker", 0, chief=["c:1"], worker=WORKERS),
        (1, 4, 0, 2, 1, 3),
        "tf_config",
    ),
    "TF_CONFIG, its chief": (
        tf_config("chief", 0, chief=["c:1"], worker=WORKERS),
        (0, 4, 0, 1, 0, 3),
        "tf_config",
    ),
    "TF_CONFIG without a cluster": ({"TF_CONFIG": "{}"}, (0, 1, 0, 1, 0, 1), "none"),
}


@pytest.mark.parametrize(("env", "numbers", "launcher"), CASES.values(), ids=CASES)
def test_the_place_of_a_process(env, numbers, launcher):
    facts = read_topology(env)
    assert facts == Topology(*numbers, env.get("UNISONO_COORDINATOR"), launcher)
    assert facts.is_chief == (numbers[0] == 0)


def test_the_coordinator_may_be_named_for_every_launcher():
    for env in (TORCHRUN, OPEN_MPI, MPICH, SRUN, tf_config("worker", 1, worker=WORKERS)):
        facts = read_topology(env | {"UNISONO_COORDINATOR": "10.0.0.1:4000"})
        assert facts.coordinator == "10.0.0.1:4000"


@pytest.mark.parametrize("env", [OURS, TORCHRUN, OPEN_MPI, MPICH, SRUN])
def test_a_process_that_a_member_starts_is_none(env):
    assert read_topology(env | {JOINED: "1"}) == Topology()
    assert read_topology(env | {JOINED: str(os.getpid())}).launcher != "none"


NONSENSE = {
    "a rank outside": (OURS | {"UNISONO_RANK": "6"}, "rank 6 and world size 6"),
    "not a number": (
        OURS | {"UNISONO_NODE": "first"},
        "UNISONO_NODE='first' is not a whole number",
    ),
    "less than nothing": (OURS | {"UNISONO_RANK": "-1"}, "UNISONO_RANK='-1' is not a whole number"),
    "half of it": ({"UNISONO_RANK": "0"}, "UNISONO_WORLD_SIZE is not set, though others"),
    "a local rank outside": (OURS | {"UNISONO_LOCAL_RANK": "3"}, "local rank 3 and local size 3"),
    "a node outside": (OURS | {"UNISONO_NODE": "2"}, "node 2 and number of nodes 2"),
    "a node larger than the world": (
        OURS | {"UNISONO_LOCAL_SIZE": "7"},
        "local size 7 and world size 6",
    ),
    "more nodes than processes": (
        OURS | {"UNISONO_NUM_NODES": "7"},
        "number of nodes 7 and world size 6",
    ),
    "torchrun": (TORCHRUN | {"RANK": "8"}, "torchrun say rank 8 and world size 8"),
    "Open MPI": (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE is not set"),
    "Open MPI, nobody here": (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "0"}, "no process is said"),
    "PMI that does not say where": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALRANKID is not"),
    "Slurm": (SRUN | {"SLURM_PROCID": "4"}, "slurm say rank 4 and world size 4"),
    "Slurm's list": (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "is not a list of counts"),
    "Slurm's short list": (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4"}, "counts 1 node"),
    "no JSON": ({"TF_CONFIG": "{"}, "TF_CONFIG is not what TensorFlow expects"),
    "JSON of another kind": ({"TF_CONFIG": "[1]"}, "TF_CONFIG is not what TensorFlow expects"),
    "a parameter server": (tf_config("ps", 0, worker=WORKERS, ps=["d:1"]), "this process a 'ps'"),
    "a worker too many": (tf_config("worker", 3, worker=WORKERS), "worker 3, and names 3 of them"),
}


@pytest.mark.parametrize(("env", "said"), NONSENSE.values(), ids=NONSENSE)
def test_what_makes_no_sense_is_an_error(env, said):
    with pytest.raises(LaunchError) as raised:
        read_topology(env)
    assert said in str(raised.value)
    assert "Start" in str(raised.value)


def test_the_public_call_reads_once(monkeypatch):
    before = ask()
    monkeypatch.setenv("UNISONO_RANK", "nonsense")
    assert ask() is before
