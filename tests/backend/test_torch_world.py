"""torch in a run of several processes: collectives, and models that stay equal."""

import os
import time

import numpy as np
import pytest
from twins import BACKEND, TOLERANCE, apart

import unisono

if BACKEND != "torch":
    pytest.skip("torch's part of a run of several processes", allow_module_level=True)

import torch
import torch_world
from torch_world import DTYPES, OPS

SIZE = 3


@pytest.fixture(scope="module")
def every():
    """The results of each process."""
    return unisono.spawn(torch_world.found_by_each, replicas=SIZE)


@pytest.mark.parametrize("op", OPS)
def test_reduce(every, op):
    numpy_op = {"sum": np.sum, "min": np.min, "max": np.max, "product": np.prod}[op]
    own, other, scalar = (numpy_op(v) for v in ([1, 2, 3], [3, 3, 3], [2.0, 3.0, 4.0]))
    truth = op in ("sum", "max")
    for found in every:
        assert found["reduced"][op] == [[own, other]] * len(DTYPES) + [scalar]
        assert found["reduced"][op, "bool"] == [[True, truth, False]]


def test_reduce_of_what_is_not_contiguous_and_of_nothing(every):
    for found in every:
        assert found["reduced"]["transposed"] == [[[0, 9], [3, 12], [6, 15]], []]


def test_broadcast_from_any_rank(every):
    for found in every:
        *vectors, scalar, column = found["broadcast"]
        assert vectors == [[1, 1]] * (len(DTYPES) + 1)
        assert (scalar, column) == (1, [[1], [0]])


def test_a_process_alone_has_no_collectives():
    with pytest.raises(unisono.errors.StrategyError, match="unisono run"):
        torch_world.collectives()


def test_nothing_listens_beyond_loopback(every):
    for found in every:
        assert set(found["listening"]) == {"127.0.0.1"}


# -- models ---------------------------------------------------------------------------------------


def test_what_the_chief_freezes_is_frozen_everywhere(every):
    assert [found["frozen"] for found in every] == [[True, False, True, True]] * SIZE


def test_random_numbers_differ_in_steps_only(every):
    parts = [found["random"] for found in every]
    drawn = {tuple(numbers) for part in parts for numbers in part["in steps"]}
    assert len(drawn) == 2 * SIZE
    assert all(part["is outside the same"] for part in parts)
    assert len({tuple(part["outside"]) for part in parts}) == 1
    assert len({tuple(part["seed"]) for part in parts}) == SIZE


def test_a_model_that_its_first_call_builds(every):
    first = every[0]["unbuilt"]["predicted"]
    assert first.shape == (8, 1)
    for found in every:
        assert (found["unbuilt"]["predicted"] == first).all()
        # Its step is tried before it is run, which builds the model equally in all processes.
        assert found["unbuilt"]["error"] == ""
        assert (found["unbuilt"]["kernel"] == every[0]["unbuilt"]["kernel"]).all()


def test_a_loss_of_the_whole_batch_where_rows_are_fewer_than_processes(every):
    expected = torch_world.small_batches(make_parallel=lambda model: model)
    for found in every:
        assert apart(expected, found["small_batches"]) <= TOLERANCE


def test_a_sum_of_fewer_rows_than_processes_by_an_optimizer_of_torch(every):
    expected = torch_world.summed(make_parallel=lambda model: model)
    for found in every:
        assert apart(expected, found["summed"]) <= TOLERANCE


def test_an_optimizer_of_torch_in_a_callback_of_the_chief_alone(every):
    assert [found["probed"] for found in every] == [[[-1.0], [-1.0]], None, None]


def ends_in_a_collective(marker):
    own = torch_world.collectives()
    own.barrier()
    if torch_world.rank() == 1:
        time.sleep(1.0)  # The other one must be out of the barrier.
        os._exit(7)
    try:
        own.all_reduce([torch.ones(3)], "sum")
    except unisono.errors.PeerLostError as error:
        marker.write_text(str(error))
        raise


def test_a_collective_does_not_wait_for_who_is_gone(tmp_path):
    marker = tmp_path / "marker"
    began = time.monotonic()
    with pytest.raises(unisono.WorkerError, match=r"Replica 1 \(process \d+\) exited with code 7"):
        unisono.spawn(ends_in_a_collective, (marker,), replicas=2)
    assert time.monotonic() - began < 60
    assert "Another process of the group is gone" in marker.read_text()
