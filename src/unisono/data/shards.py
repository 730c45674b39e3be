"""Which samples a replica sees at a step: arithmetic on plain positions.

A global batch of n rows is split into contiguous shards whose sizes differ by at most one, so
that joining the replicas' rows in replica order gives the batch back. The same arithmetic works
on Python integers and on a backend's integer tensors (n may be known only inside a graph).
"""

from typing import Any


def shard_bounds(num_rows: Any, num_replicas: int, replica: int) -> tuple[Any, Any]:
    """First row and past-the-last row of a replica's shard of a global batch.

    >>> [shard_bounds(10, 4, replica) for replica in range(4)]
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    return num_rows * replica // num_replicas, num_rows * (replica + 1) // num_replicas


def shard_sizes(num_rows: int, num_replicas: int) -> list[int]:
    """How many rows each replica gets of a global batch.

    >>> shard_sizes(10, 4)
    [2, 3, 2, 3]
    """
    bounds = [shard_bounds(num_rows, num_replicas, r) for r in range(num_replicas)]
    return [stop - start for start, stop in bounds]


def nearest_divisible(global_batch: int, num_replicas: int) -> int:
    """The global batch nearest to the one asked for that every replica shares equally.

    >>> nearest_divisible(100, 8), nearest_divisible(3, 8)
    (104, 8)
    """
    below = global_batch // num_replicas * num_replicas
    above = below + num_replicas
    nearest = below if global_batch - below < above - global_batch else above
    return max(nearest, num_replicas)
