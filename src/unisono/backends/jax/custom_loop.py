"""A user's own training loop under JAX: their step, compiled once for all devices.

A step sees the global batch, whatever the number of devices, so what it returns is already the
sum or the mean over all rows: placing state and batches is all that a loop needs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np

from unisono.backends.jax.mesh import ReplicaMesh
from unisono.backends.jax.throttle import await_turn, note_step
from unisono.devices import Placement
from unisono.errors import StrategyError


class JaxLoop:
    """See base.CustomLoop."""

    def __init__(self, placement: Placement) -> None:
        self.num_replicas = placement.num_replicas
        self._placement = placement

    @property
    def _mesh(self) -> ReplicaMesh:
        # Made anew: JAX's devices are others once a later call has asked for more of them.
        return ReplicaMesh(self._placement)

    def begin_epoch(self) -> None:
        """Nothing is set up for an epoch."""

    def split(self, batch: Any, num_rows: int) -> Any:
        return self._mesh.place(keras.tree.map_structure(_as_array, batch))

    def end_epoch(self) -> None:
        """Nothing is left open."""

    def run(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._placement.kind != "cpu":
            return step(*args, **kwargs)
        await_turn()
        outputs = step(*args, **kwargs)
        note_step(outputs)
        return outputs

    def reduce(self, how: str, value: Any, axis: int | None) -> Any:
        def reduce_leaf(leaf: Any) -> Any:
            self._check(leaf)
            if axis is None:
                return leaf
            return leaf.sum(axis) if how == "sum" else leaf.mean(axis)

        return keras.tree.map_structure(reduce_leaf, value)

    def gather(self, value: Any, axis: int) -> Any:
        def gather_leaf(leaf: Any) -> Any:
            self._check(leaf)
            return jax.device_put(leaf, self._mesh.replicated)

        return keras.tree.map_structure(gather_leaf, value)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        return (value,)

    def reduce_gradients(self, gradients: Any) -> Any:
        """A step sees the global batch, and so do its gradients."""
        return gradients

    def replicate(self, state: Any) -> Any:
        replicated = self._mesh.replicated

        def put(leaf: Any) -> Any:
            if isinstance(leaf, keras.Variable):
                leaf._value = jax.device_put(leaf._value, replicated)
                return leaf._value
            return jax.device_put(leaf, replicated)

        return keras.tree.map_structure(put, state)

    def num_rows(self) -> Any:
        return None

    def part_of_sum(self, value: Any) -> Any:
        return value

    def num_parts(self) -> int:
        return 1

    def _check(self, value: Any) -> None:
        is_array = isinstance(value, jax.Array)
        is_traced = isinstance(value, jax.core.Tracer)
        ours = set(self._mesh.devices)
        if not is_array or not (is_traced or value.devices() <= ours):
            raise StrategyError(
                f"Asked to join the replicas' values of a {type(value).__name__}, which is not "
                "what strategy.run returned. Pass the result of strategy.run."
            )


def _as_array(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, jax.Array):
        return leaf
    return np.asarray(leaf)
