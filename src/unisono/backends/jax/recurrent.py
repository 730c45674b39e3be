"""LSTMs by cuDNN's kernel, which Keras takes on GPUs, with each replica computing its own rows.

XLA cannot partition that kernel: by itself it gathers the rows of all replicas on every one of
them, and each computes all. Rows are independent, so mapping the call over the shards computes the
same. Without a GPU, with masks or other activations, Keras' own loop is partitioned as it is.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from unisono.backends.jax.mesh import AXIS, traced_mesh
from unisono.hooks import Patch

_ROWS = PartitionSpec(AXIS)
_STATES = PartitionSpec(None, AXIS)  # Of each layer and direction, one a row.
_WEIGHTS = PartitionSpec()


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
        run = jax.shard_map(
            lambda *arrays: lstm(*arrays, *args, **kwargs),
            mesh=mesh.mesh,
            in_specs=(_ROWS, _STATES, _STATES, _WEIGHTS, _ROWS),
            out_specs=(_ROWS, _STATES, _STATES),
            check_vma=False,  # The kernel's primitive has no rule for it.
        )
        return run(x, h_0, c_0, weights, seq_lengths)

    return mapped


fused_lstms_split = Patch(_rnn_module, "lstm", _by_replica)
"""Applied while a step is traced; Keras looks the function up at each call."""
