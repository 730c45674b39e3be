"""Batch norm of the global batch with one meeting of the replicas, where XLA would have two.

XLA adds up the mean first and the squared distances from it next, so at every batch norm each
replica waits twice for the slowest one. Here each takes statistics of its own rows, and those of
all are put together, which loses no digits either.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import jax
from jax.sharding import Sharding
from keras import ops

from unisono.hooks import bind
from unisono.replication.batch_norm import local_moments

_thread = threading.local()


class Mesh(Protocol):
    """How the replicas' devices hold an array."""

    replicated: Sharding
    split: Sharding


@contextlib.contextmanager
def tracing_step() -> Iterator[None]:
    """While a step of the replicas is traced: elsewhere a layer's inputs are not on their mesh."""
    before = getattr(_thread, "is_tracing", False)
    _thread.is_tracing = True
    try:
        yield
    finally:
        _thread.is_tracing = before


def gather_statistics(layer: Any, num_replicas: int, mesh: Mesh) -> None:
    """Take a layer's moments from those of each replica's rows, in a compiled step."""

    def moments(inputs: Any, mask: Any) -> tuple[Any, Any]:
        num_rows = inputs.shape[0]
        is_plain = mask is None and 0 in layer._reduction_axes
        if num_rows % num_replicas or not (is_plain and getattr(_thread, "is_tracing", False)):
            return local_moments(layer, inputs, mask)
        by_replica = ops.reshape(
            inputs, (num_replicas, num_rows // num_replicas, *inputs.shape[1:])
        )
        by_replica = jax.lax.with_sharding_constraint(by_replica, mesh.split)
        axes = [axis + 1 for axis in layer._reduction_axes]
        own = ops.stack(ops.moments(by_replica, axes=axes), axis=1)
        # As a sum, since XLA makes one meeting of several sums; it does not join what it gathers.
        places = ops.reshape(ops.eye(num_replicas, dtype=own.dtype), (num_replicas, -1, 1, 1))
        every = ops.sum(places * own[:, None], axis=0)
        means, variances = ops.unstack(every, axis=1)
        mean = ops.mean(means, axis=0)
        return mean, ops.mean(variances + ops.square(means - mean), axis=0)

    bind(layer, "_moments", moments)
