"""Batch norm of the global batch with one all-reduce, where XLA would insert two.

XLA all-reduces the mean first and the squared distances from it next, so at every batch norm each
replica waits twice for the slowest one. Here each computes the moments of its own rows, and those
of all replicas are merged, which is as precise.
"""

from typing import Any

import jax
from keras import ops

from unisono.backends.jax.mesh import ReplicaMesh, traced_mesh
from unisono.hooks import bind
from unisono.replication.batch_norm import local_moments


def gather_statistics(layer: Any, mesh: ReplicaMesh) -> None:
    """Merge a layer's moments from those of each replica's rows, in a compiled step."""

    def moments(inputs: Any, mask: Any) -> tuple[Any, Any]:
        num_rows = inputs.shape[0]
        is_plain = mask is None and 0 in layer._reduction_axes
        if num_rows % mesh.size or not (is_plain and traced_mesh() is mesh):
            return local_moments(layer, inputs, mask)
        by_replica = ops.reshape(inputs, (mesh.size, num_rows // mesh.size, *inputs.shape[1:]))
        by_replica = jax.lax.with_sharding_constraint(by_replica, mesh.split)
        axes = [axis + 1 for axis in layer._reduction_axes]
        own = ops.stack(ops.moments(by_replica, axes=axes), axis=1)
        # A sum of rows that are zero elsewhere, since XLA combines several all-reduces into one
        # and does not combine all-gathers.
        rows = ops.reshape(ops.eye(mesh.size, dtype=own.dtype), (mesh.size, -1, 1, 1))
        every = ops.sum(rows * own[:, None], axis=0)
        means, variances = ops.unstack(every, axis=1)
        mean = ops.mean(means, axis=0)
        return mean, ops.mean(variances + ops.square(means - mean), axis=0)

    bind(layer, "_moments", moments)
