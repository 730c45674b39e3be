"""Orbax's checkpoints in a run of several processes on JAX.

Orbax then saves with all processes together, and refuses arrays of one process' own, which is how a
program sees a model's values. So while it saves they are shown as what they are: whole on all.
"""

from typing import Any

import keras

from unisono.backends.jax.global_mesh import world_mesh
from unisono.hooks import bind, original, unbind


def save_together(callback: Any) -> None:
    """Have keras.callbacks.OrbaxCheckpoint save arrays that lie on the devices of all processes."""
    mesh = world_mesh()

    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        model = callback.model

        def get_state_tree(*args: Any, **kwargs: Any) -> Any:
            tree = original(model, "get_state_tree")(*args, **kwargs)
            return keras.tree.map_structure(mesh.put, tree)

        bind(model, "get_state_tree", get_state_tree)
        try:
            return original(callback, "_save_checkpoint")(*args, **kwargs)
        finally:
            unbind(model, "get_state_tree")

    bind(callback, "_save_checkpoint", save_checkpoint)
