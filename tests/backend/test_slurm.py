"""Jobs of a Slurm cluster that train: on two nodes with two GPUs each, and ended in every way."""

import os
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import slurm_program
from slurm_cluster import make_cluster

pytestmark = [pytest.mark.namespaces, pytest.mark.slow]
PROGRAM = Path(slurm_program.__file__)
GPUS = ["--env", "UNISONO_SIMULATED_GPUS=2"]
BACKEND = ["--env", f"KERAS_BACKEND={keras.backend.backend()}"]
TWO_NODES = ["--nodes", 2, "--gpus-per-node", 2, *GPUS, *BACKEND]
on_one_backend = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="how jobs end is no matter of backends"
)
ONE_NODE = ["--nodes", 1, "--gpus-per-node", 2, *GPUS, *BACKEND]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with make_cluster(tmp_path_factory.mktemp("cluster"), 2) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    model = slurm_program.net()
    slurm_program.train(model, 2, [])
    return model.get_weights()


def submit(cluster, folder: Path, *words: object) -> str:
    done = cluster.unisono("submit", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[2]


def wait_until_it_trains(cluster, folder: Path, job: str) -> None:
    def describe() -> str:
        texts = [path.read_text() for path in [*folder.glob("*.err"), *folder.glob("*/*.log")]]
        return "\n".join([cluster.state(job), *texts])

    cluster.wait_for(lambda: (folder / "under-way").exists(), 120, describe)


def check_weights(folder: Path, expected: list[np.ndarray], num_ranks: int) -> None:
    for rank in range(num_ranks):
        with np.load(folder / f"rank-{rank}.npz") as found:
            for value, right in zip(found.values(), expected, strict=True):
                np.testing.assert_allclose(value, right, rtol=1e-5, atol=1e-6)


def test_two_nodes_with_two_gpus_each_give_what_one_device_gives(cluster, tmp_path, expected):
    words = [*TWO_NODES, "--job-name", "keras", "--wait", PROGRAM, "briefly"]
    done = cluster.unisono("submit", *words, cwd=tmp_path, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "complete 4" in done.stdout
    check_weights(tmp_path, expected, 4)


@on_one_backend
def test_a_hand_written_script_of_more_tasks_than_gpus(cluster, tmp_path, expected):
    """As old guides have it: then some have nothing to do, and it is said."""
    (tmp_path / "job.sh").write_text(
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gres=gpu:2\n"
        "#SBATCH --ntasks-per-node=8\n#SBATCH --output=out\n"
        f"srun {sys.executable} {PROGRAM} briefly\n"
    )
    env = {"UNISONO_SIMULATED_GPUS": "2", "KERAS_BACKEND": keras.backend.backend()}
    words = ["sbatch", "--wait", "job.sh"]
    done = cluster.run(*words, cwd=tmp_path, timeout=250, **env)
    said = (tmp_path / "out").read_text()
    assert done.returncode == 0, said
    assert said.count("complete 4") == 4
    assert said.count("Change the batch script: #SBATCH --ntasks-per-node=2") == 1
    check_weights(tmp_path, expected, 4)


@on_one_backend
def test_a_job_makes_room_and_goes_on_later(cluster, tmp_path, expected):
    """When one of higher priority needs its nodes."""
    job = submit(cluster, tmp_path, *TWO_NODES, "--requeue", PROGRAM, "saving")
    wait_until_it_trains(cluster, tmp_path, job)
    words = ["sbatch", "--parsable", "-p", "high", "-N2", "--exclusive", "--wrap=true"]
    other = cluster.call(*words, cwd=tmp_path)
    cluster.wait_for_state(other, "COMPLETED", seconds=60)
    told = {(tmp_path / f"told-{rank}").read_text() for rank in range(4)}
    assert len(told) == 1  # All of them after the same step.
    assert "['loss']" in told.pop()
    cluster.wait_for_state(job, "COMPLETED", seconds=250)
    check_weights(tmp_path, expected, 4)


@on_one_backend
def test_a_job_is_warned_before_its_time_limit(cluster, tmp_path):
    words = [*ONE_NODE, "--time", 1, "--warn-before", 15, PROGRAM, "saving"]
    job = submit(cluster, tmp_path, *words)
    wait_until_it_trains(cluster, tmp_path, job)
    assert cluster.wait_for_state(job, "FAILED", "TIMEOUT", seconds=120) == "FAILED"
    assert (tmp_path / "saved.keras").exists()
    done = cluster.unisono("jobs", cwd=tmp_path)
    row = next(line for line in done.stdout.splitlines() if line.startswith(job))
    assert row.split()[2:4] == ["FAILED", "75"]


@on_one_backend
def test_a_job_that_is_cancelled_ends_everywhere(cluster, tmp_path):
    job = submit(cluster, tmp_path, *TWO_NODES, PROGRAM, "endlessly")
    wait_until_it_trains(cluster, tmp_path, job)
    done = cluster.unisono("cancel", job, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    cluster.wait_for_state(job, "CANCELLED", seconds=20)
    cluster.wait_for(lambda: not processes_of(PROGRAM, tmp_path), 20)


@on_one_backend
def test_a_node_that_dies_ends_the_run_on_the_others(cluster, tmp_path):
    job = submit(cluster, tmp_path, *TWO_NODES, PROGRAM, "endlessly")
    wait_until_it_trains(cluster, tmp_path, job)
    began = time.monotonic()
    cluster.kill_node(2)
    try:
        cluster.wait_for(lambda: not processes_of(PROGRAM, tmp_path), 30)
        assert time.monotonic() - began < 30
        cluster.wait_for_state(job, "NODE_FAIL", "FAILED", seconds=60)
        said = "".join(path.read_text() for path in tmp_path.glob("*.err"))
        assert "n2" in said
        assert "lost" in said
    finally:
        cluster.revive_node(2)


def processes_of(program: Path, folder: Path) -> list[str]:
    found = subprocess.run(["pgrep", "-f", str(program)], capture_output=True, text=True).stdout
    here = []
    for pid in found.split():
        try:
            if Path(os.readlink(f"/proc/{pid}/cwd")) == folder:
                here.append(pid)
        except OSError:
            continue
    return here
