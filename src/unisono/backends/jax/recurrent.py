"""Recurrent layers, whose loop over time each replica runs on its own rows.

XLA does not move an all-reduce out of a loop: in the backward pass of a loop that it has
partitioned itself, replicas all-reduce the gradients of the weights at every time step. cuDNN's
kernel, which Keras takes for LSTMs on GPUs, it cannot partition at all, so that each device
computes all rows. Rows are independent, so mapping the loop over the shards computes the same, with
one all-reduce after it.
"""

from typing import Any

import jax
import keras
from jax.sharding import PartitionSpec

from unisono.backends.jax.mesh import AXIS, ReplicaMesh, traced_mesh
from unisono.hooks import bind, original, unbind

_ROWS = PartitionSpec(AXIS)
_REPLICATED = PartitionSpec()


def is_recurrent(layer: Any) -> bool:
    """Whether a layer is one of Keras' own, with cells of Keras, which compute row by row."""
    return isinstance(layer, keras.layers.RNN) and all(map(_is_of_keras, (layer, *_cells(layer))))


def split_loop(layer: Any, mesh: ReplicaMesh) -> None:
    """Map a recurrent layer's loop over the shards of a batch, in a compiled step."""

    def inner_loop(sequences: Any, initial_state: Any, mask: Any, training: bool = False) -> Any:
        plain = original(layer, "inner_loop")
        num_rows = keras.tree.flatten(sequences)[0].shape[0]
        draws = training and any(map(_has_dropout, _cells(layer)))
        # Dropout masks are drawn in the loop, for the rows of the global batch.
        if draws or traced_mesh() is not mesh or num_rows % mesh.size:
            return plain(sequences, initial_state, mask, training=training)
        weights = layer.cell.weights

        def run(values: Any, sequences: Any, initial_state: Any, mask: Any) -> Any:
            # What a mapped function closes over belongs to the mesh outside of it.
            with keras.StatelessScope(state_mapping=list(zip(weights, values, strict=True))):
                return plain(sequences, initial_state, mask, training=training)

        mapped = jax.shard_map(
            run,
            mesh=mesh.mesh,
            in_specs=(_REPLICATED, _ROWS, _ROWS, _ROWS),
            out_specs=_ROWS,
            check_vma=False,  # cuDNN's primitive has no rule for it.
        )
        return mapped([weight.value for weight in weights], sequences, initial_state, mask)

    bind(layer, "inner_loop", inner_loop)


def restore_loop(layer: Any) -> None:
    """Give a layer back to plain Keras."""
    unbind(layer, "inner_loop")


def _cells(layer: Any) -> list[Any]:
    return list(getattr(layer.cell, "cells", [layer.cell]))


def _is_of_keras(layer: Any) -> bool:
    return type(layer).__module__.partition(".")[0] == "keras"


def _has_dropout(cell: Any) -> bool:
    return bool(getattr(cell, "dropout", 0) or getattr(cell, "recurrent_dropout", 0))
