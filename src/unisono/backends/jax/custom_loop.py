"""A custom training loop on JAX: the user's step, compiled once for all devices.

A step sees the global batch, whatever the number of devices, so what it returns is already the sum
or the mean over all rows: placing state and batches is all that a loop needs. In a run of several
processes each places its rows; results that are replicated are returned as arrays of this process,
and placed again when the next step takes them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np

from unisono.backends.jax.collectives import JaxCollectives
from unisono.backends.jax.internals import uncommitted
from unisono.backends.jax.mesh import ReplicaMesh, mesh_of, peers_watched
from unisono.backends.jax.throttle import await_turn, note_step
from unisono.data.feed import Feed
from unisono.devices import Placement
from unisono.errors import StrategyError


class JaxLoop:
    """See base.CustomLoop."""

    def __init__(self, placement: Placement) -> None:
        self.num_replicas = placement.num_replicas
        self._placement = placement
        is_alone = placement.num_processes == 1
        world = None if is_alone else self._mesh.world
        self._feed = None if world is None else Feed(world, needs_even_shards=True)

    @property
    def _mesh(self) -> ReplicaMesh:
        # Not kept: JAX has other devices once a later call has asked for more of them.
        return mesh_of(self._placement)

    def begin_epoch(self) -> None:
        """Nothing is set up for an epoch."""

    def split(self, batch: Any, num_rows: int) -> Any:
        mesh = self._mesh
        batch = keras.tree.map_structure(_as_array, batch)
        if self._feed is None:
            return mesh.place(mesh.as_shard(batch))
        with self._feed.calling("distributed data set"):
            shard = self._feed.shard(batch)
            self._feed.agree(shard, [], list)
        return mesh.place(shard)

    def end_epoch(self) -> None:
        """Nothing is left open."""

    def run(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        mesh = self._mesh
        if self._feed is not None:
            args, kwargs = jax.tree.map(self._placed, (tuple(args), dict(kwargs)))
        with peers_watched():
            if mesh.is_cpu:
                await_turn()
            outputs = step(*args, **kwargs)
            if self._feed is not None:
                outputs = jax.tree.map(mesh.result, outputs)
            if mesh.is_cpu:
                note_step(outputs)
        return outputs

    def reduce(self, how: str, value: Any, axis: int | None) -> Any:
        def reduce_leaf(leaf: Any) -> Any:
            whole = self._addressable(leaf)
            if axis is None:
                return whole
            return whole.sum(axis) if how == "sum" else whole.mean(axis)

        return keras.tree.map_structure(reduce_leaf, value)

    def gather(self, value: Any, axis: int) -> Any:
        def gather_leaf(leaf: Any) -> Any:
            whole = self._addressable(leaf)
            return self._mesh.put(whole) if self._feed is None else whole

        return keras.tree.map_structure(gather_leaf, value)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """What is on this process' devices: its rows of what is sharded over all."""
        own = value if self._feed is None else keras.tree.map_structure(self._mesh.own, value)
        return (own,)

    def reduce_gradients(self, gradients: Any) -> Any:
        """A step sees the global batch, and so do its gradients."""
        return gradients

    def replicate(self, state: Any) -> Any:
        """The state, in a run the chief's, on every device."""
        mesh = self._mesh
        # Keras' tree knows the containers of layers and keeps the order of keys; JAX's knows the
        # classes that a program has registered, and None.
        leaves = keras.tree.flatten(state)
        parts = [jax.tree.flatten(leaf._value if _is_variable(leaf) else leaf) for leaf in leaves]
        values = [value for found, _ in parts for value in found]
        if self._feed is not None:
            values = JaxCollectives(mesh).broadcast(values, root=0)
        pairs = iter([(value, mesh.put(value)) for value in values])
        results = []
        for leaf, (found, structure) in zip(leaves, parts, strict=True):
            own = [next(pairs) for _ in found]
            results.append(jax.tree.unflatten(structure, [array for _, array in own]))
            if _is_variable(leaf):
                value, array = own[0]
                leaf._value = array if self._feed is None else uncommitted(value)
        return keras.tree.pack_sequence_as(state, results)

    def num_rows(self) -> Any:
        return None

    def part_of_sum(self, value: Any) -> Any:
        return value

    def num_parts(self) -> int:
        return 1

    def _placed(self, leaf: Any) -> Any:
        is_own = isinstance(leaf, jax.Array) and leaf.is_fully_addressable
        return self._mesh.put(leaf) if is_own else leaf

    def _addressable(self, value: Any) -> Any:
        """What a step returned, with the rows of all processes, as an array of this process."""
        mesh = self._mesh
        is_traced = isinstance(value, jax.core.Tracer)
        is_array = isinstance(value, jax.Array)
        if not is_array or not (is_traced or value.devices() <= set(mesh.devices)):
            raise StrategyError(
                f"Asked to join the replicas' values of a {type(value).__name__}, which is not "
                "what strategy.run returned. Pass the result of strategy.run."
            )
        if is_traced or value.is_fully_addressable:
            return value
        with peers_watched():
            return mesh.own(mesh.put(value))


def _as_array(leaf: Any) -> Any:
    return leaf if leaf is None or isinstance(leaf, jax.Array) else np.asarray(leaf)


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, keras.Variable)
