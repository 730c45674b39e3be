"""What srun gave a task: read from its variables, and judged before anything is loaded."""

import pytest
from launcher_variables import task

from unisono.errors import LaunchError
from unisono.slurm.step import fit_ranks, launcher_role, read_step, remark_on_allocation
from unisono.topology import read_topology


def fit(env: dict):
    return fit_ranks(read_topology(env), read_step(env))


def role(env: dict):
    return launcher_role(read_step(env))[0]


def test_a_program_that_srun_did_not_start_has_no_step():
    assert read_step({"SLURM_JOB_ID": "5", "SLURM_GPUS_ON_NODE": "2"}) is None


@pytest.mark.parametrize("seen", [None, 1], ids=["gres", "gpus_per_task"])
def test_one_task_for_each_gpu_is_right(seen):
    facts, remark = fit(task("2(x2)", 2, node=1, local=1, seen=seen))
    assert (facts.rank, facts.world_size, remark) == (3, 4, "")


def test_without_gpus_every_task_is_a_rank():
    facts, remark = fit(task("3,1", 0, node=1))
    assert (facts.world_size, facts.local_size, remark) == (4, 1, "")


def test_of_too_many_tasks_one_for_each_gpu_trains():
    places = []
    for node in (0, 1):
        for local in range(8):
            facts, remark = fit(task("8(x2)", 2, node=node, local=local))
            assert "#SBATCH --ntasks-per-node=2" in remark
            if facts is not None:
                places.append((facts.rank, facts.world_size, facts.local_rank, facts.local_size))
    assert places == [(0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2)]


def test_too_many_tasks_of_uneven_nodes_are_an_error():
    with pytest.raises(LaunchError, match=r"#SBATCH --ntasks-per-node=2"):
        fit(task("8,4", 2))


def test_too_few_tasks_are_an_error_with_both_ways_out():
    with pytest.raises(LaunchError, match=r"srun unisono run script.py.*--ntasks-per-node=4"):
        fit(task("1(x2)", 4))


def test_a_single_task_may_use_all_gpus_of_its_node():
    env = task("1", 4, nodes=1)
    facts, remark = fit(env)
    assert (facts.world_size, remark) == (1, "")


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (task("1(x2)", 4), "launch"),
        (task("1", 4, nodes=1), "launch"),
        (task("2(x2)", 2), "rank"),
        (task("2(x2)", 2, local=1, seen=1), "rank"),
        (task("3(x2)", 0), "rank"),
        (task("8(x2)", 2), "launch"),
        (task("8(x2)", 2, local=3), "leave"),
        (task("2(x2)", 4, local=1), "leave"),
    ],
)
def test_what_the_launcher_is_in_a_task(env, expected):
    assert role(env) == expected


def test_launchers_of_uneven_nodes_are_all_ranks_or_an_error():
    for node in (0, 1):
        assert role(task("2,1", 0, node=node)) == "rank"
    with pytest.raises(LaunchError, match=r"#SBATCH --ntasks-per-node=1"):
        role(task("2,1", 4))


def test_a_launcher_that_sees_a_part_of_the_gpus_is_an_error():
    with pytest.raises(LaunchError, match=r"#SBATCH --gres=gpu:4"):
        role(task("2(x2)", 4, seen=2))


def test_a_launcher_beside_srun_is_told_of_the_other_nodes():
    batch = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "2"}
    assert "srun unisono run" in remark_on_allocation(batch)
    assert remark_on_allocation({**batch, "SLURM_JOB_NUM_NODES": "1"}) == ""
    assert remark_on_allocation({}) == remark_on_allocation(task("1(x2)", 2)) == ""
