"""A step of torch replicas as GPUs would run it: no waits, few kernels, collectives that overlap.

Real processes and gloo for the collectives and their times; for copies between host and device,
`cuda` tensors without values (fake_cuda).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("torch's part of the rehearsal", allow_module_level=True)

import torch

from gpu import torch_steps
from unisono.backends.torch.replica import TorchReplica

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def steps():
    """One step of a net with batch norms, on each replica and on plain Keras."""
    return torch_steps.run_nets("minigooglenet")


def check_waits(steps):
    beyond = steps.parallel.waits - steps.plain.waits
    assert not beyond, f"the host waits where it does not in plain Keras: {dict(beyond)}"


def check_collectives(steps):
    """One per batch norm and direction; gradients in buckets that begin early."""
    record = steps.parallel
    forward = [c for c in record.collectives if c.phase == "forward"]
    assert len(forward) == steps.num_batch_norms
    buckets = record.of_new_groups("backward")
    in_backward = [c for c in record.collectives if c.phase == "backward"]
    assert len(in_backward) == steps.num_batch_norms + len(buckets)
    assert sum(c.num_bytes for c in buckets) >= steps.num_gradient_bytes
    assert record.fraction_of_backward(buckets[0]) < 1 / 3
    # After backward, metrics alone: one collective, of a few numbers.
    assert [c.num_bytes < 100 for c in record.collectives if c.phase == "update"] == [True]


def test_no_wait_beyond_plain_keras(steps):
    for each in steps:
        check_waits(each["minigooglenet"])


def test_collectives_and_their_times(steps):
    for each in steps:
        check_collectives(each["minigooglenet"])


@pytest.mark.slow
def test_resnet50():
    for each in torch_steps.run_nets("resnet50"):
        found = each["resnet50"]
        check_waits(found)
        check_collectives(found)
        kernels = [record.kernels["forward"] for record in (found.plain, found.parallel)]
        assert kernels[1] <= 1.15 * kernels[0], kernels


def with_a_blocking_copy():
    """What a careless change would do: a number becomes a tensor on the step's path."""
    plain = TorchReplica.moments

    def moments(replica, x, mask, axes):
        mean, variance = plain(replica, x, mask, axes)
        return mean * torch.tensor(1.0, device=x.device), variance

    TorchReplica.moments = moments
    return torch_steps.record_nets(("minigooglenet",))


def test_a_blocking_copy_on_the_path_is_caught():
    found = torch_steps.run(with_a_blocking_copy)[0]["minigooglenet"]
    with pytest.raises(AssertionError, match=r"sends a value at .*test_torch_step\.py"):
        check_waits(found)


# -- fake GPUs ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_gpus():
    """What fake_cuda_steps finds, in one process, which takes long to start."""
    path = os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "gpu.fake_cuda_steps"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def beyond_plain_keras(found):
    """Lines at which the host waits in steps on several GPUs, and not on one."""
    return {line: n for line, n in found["parallel"].items() if n > found["plain"].get(line, 0)}


def test_no_copy_waits_on_gpus(on_gpus):
    found = on_gpus["steps"]
    assert sum(found["plain"].values()) > 0  # Keras' own, for the step count and the like.
    assert not beyond_plain_keras(found)


def test_a_blocking_copy_to_a_gpu_is_caught(on_gpus):
    ((line, count),) = beyond_plain_keras(on_gpus["steps_with_a_blocking_copy"]).items()
    assert line.startswith("copies cpu to cuda at gpu/fake_cuda_steps.py")
    assert count == 2  # In two steps.


def test_a_compiled_model_moves_to_other_gpus(on_gpus):
    assert on_gpus["moved"] == {"devices": ["cuda:2"]}


def test_a_failed_worker_is_reported_and_the_communicators_aborted(on_gpus):
    assert on_gpus["failure"] == {
        "error": "'in a worker'",
        "are aborted": [True, True],
        "is restarted": True,
        "again": ["loss", "mae"],
    }


def test_tensors_beside_variables_go_through_the_cpu(on_gpus):
    assert on_gpus["pickled"] == {"sent": "cuda:2", "device": "cuda:0"}


def test_a_process_that_sees_all_gpus_uses_its_own(on_gpus):
    assert on_gpus["joined"] == {"device": "cuda:3"}
