"""What XLA makes of a train step on four A100s, compiled without one; see docs/gpu.md."""

import importlib.util

import pytest

from gpu.jax_rows import compiled

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda12_plugin") is None,
        reason="JAX's CUDA plugin is not installed: pip install 'jax[cuda12]'",
    ),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def steps():
    """The steps of a convolutional net, which has batch norm, and of an LSTM."""
    return compiled("unisono", ["minigooglenet", "lstm"], gpus=4)


def test_gradients_are_reduced_during_the_backward_pass(steps):
    for found in steps.values():
        assert found["asynchronous"] >= 90
        assert found["collectives"] >= 1


def test_no_activation_is_gathered(steps):
    assert [found["gathers"] for found in steps.values()] == [0, 0]


def test_one_collective_for_each_batch_norm(steps):
    assert steps["minigooglenet"]["collectives"] <= 40
