"""Shards of a global batch: contiguous, complete, and as equal as they can be."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.shards import nearest_divisible, shard_bounds, shard_sizes

rows = st.integers(0, 100_000)
counts = st.integers(1, 64)


def all_bounds(num_rows, num_replicas):
    return [shard_bounds(num_rows, num_replicas, replica) for replica in range(num_replicas)]


@given(rows, counts)
def test_shares_are_contiguous_and_cover_the_batch(num_rows, num_replicas):
    bounds = all_bounds(num_rows, num_replicas)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_rows
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
    assert all(start <= stop for start, stop in bounds)


@given(rows, counts)
def test_sizes_differ_by_at_most_one(num_rows, num_replicas):
    sizes = shard_sizes(num_rows, num_replicas)
    assert len(sizes) == num_replicas
    assert sum(sizes) == num_rows
    assert max(sizes) - min(sizes) <= 1
    assert sizes == [stop - start for start, stop in all_bounds(num_rows, num_replicas)]


@given(rows, counts)
def test_no_replica_is_empty_unless_rows_run_out(num_rows, num_replicas):
    assert (min(shard_sizes(num_rows, num_replicas)) == 0) == (num_rows < num_replicas)


@given(rows, counts)
def test_the_first_replica_has_the_smallest_share(num_rows, num_replicas):
    """The first process writes all rows but its own for the others, and counts on this."""
    sizes = shard_sizes(num_rows, num_replicas)
    assert sizes[0] == num_rows // num_replicas == min(sizes)


@given(st.lists(st.integers(), max_size=50), counts)
def test_joining_the_shares_gives_the_batch_back(batch, num_replicas):
    shares = [batch[start:stop] for start, stop in all_bounds(len(batch), num_replicas)]
    assert list(itertools.chain.from_iterable(shares)) == batch


@given(st.integers(0, 2**20), counts)
def test_integers_of_an_array_library_give_the_same_shares(num_rows, num_replicas):
    """A backend's integers have a width; these are the narrowest that are met."""
    narrow = np.int32(num_rows)
    for replica in range(num_replicas):
        bounds = shard_bounds(narrow, num_replicas, replica)
        assert bounds == shard_bounds(num_rows, num_replicas, replica)


@given(st.integers(1, 100_000), counts)
def test_nearest_divisible_is_nearest(global_batch, num_replicas):
    nearest = nearest_divisible(global_batch, num_replicas)
    assert nearest % num_replicas == 0
    assert nearest >= num_replicas
    others = range(num_replicas, global_batch + num_replicas + 1, num_replicas)
    assert abs(nearest - global_batch) == min(abs(other - global_batch) for other in others)


def test_nearest_divisible_prefers_the_larger_of_two():
    assert nearest_divisible(6, 4) == 8
    assert nearest_divisible(8, 4) == 8
    assert nearest_divisible(5, 4) == 4
