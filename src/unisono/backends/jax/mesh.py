"""The devices of a placement as a JAX mesh, and how state and batches lie on it."""

from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unisono.backends.jax.devices import devices_of
from unisono.devices import Placement

_AXIS = "replica"


class ReplicaMesh:
    """State lies on every device, a batch is split over them if it divides."""

    def __init__(self, placement: Placement) -> None:
        self._num_replicas = placement.num_replicas
        self.devices = devices_of(placement)
        mesh = Mesh(np.array(self.devices), (_AXIS,))
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.split = NamedSharding(mesh, PartitionSpec(_AXIS))

    def place(self, batch: Any) -> Any:
        leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
        num_rows = next((leaf.shape[0] for leaf in leaves if len(leaf.shape)), 0)
        is_even = num_rows % self._num_replicas == 0

        def put(leaf: Any) -> Any:
            if leaf is None:
                return None
            is_split = is_even and isinstance(leaf, (np.ndarray, jax.Array))
            is_split = is_split and leaf.ndim > 0 and leaf.shape[0] == num_rows
            return jax.device_put(leaf, self.split if is_split else self.replicated)

        return keras.tree.map_structure(put, batch)

    def put(self, value: Any) -> Any:
        """A value of a variable as a step takes it."""
        return jax.device_put(value, self.replicated)

    def shown(self, array: Any) -> Any:
        """What a step returned, as a variable holds it."""
        return array
