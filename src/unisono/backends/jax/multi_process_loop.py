"""A user's own training loop on JAX in several processes: their step, compiled for all devices.

A step sees the global batch, of which each process placed its rows. What lies whole on every device
is given back as an array of this process, and placed again when the next step takes it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np

from unisono.backends.jax.collectives import JaxCollectives
from unisono.backends.jax.global_mesh import peers_watched, uncommitted, world_mesh
from unisono.backends.jax.throttle import await_turn, note_step
from unisono.data.feed import Feed
from unisono.devices import Placement
from unisono.errors import StrategyError


class JaxWorldLoop:
    """See base.CustomLoop."""

    # A scope adopts its models as one process does: they see the global batch in each.
    def __init__(self, placement: Placement) -> None:
        self.num_replicas = placement.num_replicas
        self._kind = placement.kind
        self._mesh = world_mesh(placement.kind)
        self._feed = Feed(self._mesh.world, needs_even_shards=True)

    def begin_epoch(self) -> None:
        """Nothing is set up for an epoch."""

    def split(self, batch: Any, num_rows: int) -> Any:
        with self._feed.calling("distributed data set"):
            share = self._feed.shard(keras.tree.map_structure(_as_array, batch))
            self._feed.agree(share, [], list)
        return self._mesh.place(share)

    def end_epoch(self) -> None:
        """Nothing is left open."""

    def run(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        args, kwargs = jax.tree.map(self._placed, (tuple(args), dict(kwargs)))
        with peers_watched():
            if self._kind == "cpu":
                await_turn()
            outputs = self._own(step(*args, **kwargs))
            if self._kind == "cpu":
                note_step(outputs)
        return outputs

    def reduce(self, how: str, value: Any, axis: int | None) -> Any:
        def reduce_leaf(leaf: Any) -> Any:
            whole = self._whole(leaf)
            if axis is None:
                return whole
            return whole.sum(axis) if how == "sum" else whole.mean(axis)

        return keras.tree.map_structure(reduce_leaf, value)

    def gather(self, value: Any, axis: int) -> Any:
        return keras.tree.map_structure(self._whole, value)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """What lies on this process' device: its rows of what is split over all."""

        def own(leaf: Any) -> Any:
            return leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf

        return (keras.tree.map_structure(own, value),)

    def reduce_gradients(self, gradients: Any) -> Any:
        """A step sees the global batch, and so do its gradients."""
        return gradients

    def replicate(self, state: Any) -> Any:
        """The chief's state, on every process' device."""
        leaves, structure = jax.tree.flatten(state, is_leaf=_is_variable)
        values = [leaf._value if _is_variable(leaf) else leaf for leaf in leaves]
        chiefs = JaxCollectives(kind=self._kind).broadcast(values, root=0)
        for leaf, value in zip(leaves, chiefs, strict=True):
            if _is_variable(leaf):
                leaf._value = uncommitted(value)
        return jax.tree.unflatten(structure, [self._mesh.put(value) for value in chiefs])

    def num_rows(self) -> Any:
        return None

    def part_of_sum(self, value: Any) -> Any:
        return value

    def num_parts(self) -> int:
        return 1

    def _placed(self, leaf: Any) -> Any:
        is_own = isinstance(leaf, jax.Array) and leaf.is_fully_addressable
        return self._mesh.put(leaf) if is_own else leaf

    def _own(self, results: Any) -> Any:
        return jax.tree.map(self._mesh.result, results)

    def _whole(self, leaf: Any) -> Any:
        """A result with the rows of all processes, as an array of this one."""
        _check(leaf)
        with peers_watched():
            return leaf if leaf.is_fully_addressable else self._mesh.shown(self._mesh.put(leaf))


def _as_array(leaf: Any) -> Any:
    return leaf if leaf is None or isinstance(leaf, jax.Array) else np.asarray(leaf)


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, keras.Variable)


def _check(value: Any) -> None:
    if not isinstance(value, jax.Array):
        raise StrategyError(
            f"Asked to join the replicas' values of a {type(value).__name__}, which is not what "
            "strategy.run returned. Pass the result of strategy.run."
        )
