"""Recurrent layers, whose loop over time each replica runs on its own rows.

XLA does not move an all-reduce out of a loop: in the backward pass of a loop that it has
partitioned itself, replicas all-reduce the gradients of the weights at every time step. cuDNN's
kernel, which Keras takes for LSTMs on GPUs, it cannot partition at all, so that each device
computes all rows. Rows are independent, so mapping the loop over the shards computes the same, with
one all-reduce after it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import keras
from jax.sharding import PartitionSpec

from unisono.backends.jax.mesh import AXIS, ReplicaMesh, traced_mesh, tracing_step
from unisono.hooks import Patch, bind, original, unbind

_ROWS = PartitionSpec(AXIS)
_STATES = PartitionSpec(None, AXIS)  # Of each layer and direction, one a row.
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
            scope = keras.StatelessScope(state_mapping=list(zip(weights, values, strict=True)))
            with scope, tracing_step(None):
                return plain(sequences, initial_state, mask, training=training)

        mapped = _mapped(mesh, run, (_REPLICATED, _ROWS, _ROWS, _ROWS), _ROWS)
        return mapped([weight.value for weight in weights], sequences, initial_state, mask)

    bind(layer, "inner_loop", inner_loop)


def restore_loop(layer: Any) -> None:
    """Give a layer back to plain Keras."""
    unbind(layer, "inner_loop")


def _rnn_module() -> Any:
    import jax.experimental.rnn

    return jax.experimental.rnn


def _by_replica(lstm: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(lstm)
    def mapped(
        x: Any, h_0: Any, c_0: Any, weights: Any, seq_lengths: Any, *args: Any, **kwargs: Any
    ) -> Any:
        mesh = traced_mesh()
        if mesh is None or x.shape[0] % mesh.size:
            return lstm(x, h_0, c_0, weights, seq_lengths, *args, **kwargs)
        in_specs = (_ROWS, _STATES, _STATES, _REPLICATED, _ROWS)
        out_specs = (_ROWS, _STATES, _STATES)
        run = _mapped(mesh, lambda *arrays: lstm(*arrays, *args, **kwargs), in_specs, out_specs)
        return run(x, h_0, c_0, weights, seq_lengths)

    return mapped


fused_lstms_split = Patch(_rnn_module, "lstm", _by_replica)
"""cuDNN's kernel of both directions, for which `Bidirectional` calls no layer's loop.

Applied while a step is traced; Keras looks the function up at each call.
"""


def _mapped(mesh: ReplicaMesh, run: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    # cuDNN's primitive has no rule for `check_vma`.
    return jax.shard_map(
        run, mesh=mesh.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def _cells(layer: Any) -> list[Any]:
    return list(getattr(layer.cell, "cells", [layer.cell]))


def _is_of_keras(layer: Any) -> bool:
    return type(layer).__module__.partition(".")[0] == "keras"


def _has_dropout(cell: Any) -> bool:
    return bool(getattr(cell, "dropout", 0) or getattr(cell, "recurrent_dropout", 0))
