"""TensorFlow's own checkpoints and saved models in a run: the chief writes, the others wait.

`tf.train.Checkpoint.save` and `write` and `tf.train.CheckpointManager.save` all call one method,
which also updates the records of a folder. A program may create checkpoints anywhere, so the method
is replaced on the class, in processes of a run only.
"""

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import tensorflow as tf

from unisono.backends.tensorflow.internals import checkpoint as checkpoints
from unisono.backends.tensorflow.internals import checkpoint_management as management
from unisono.hooks import Patch
from unisono.launch.client import World

# What a manager does to files, besides recording its checkpoints in memory.
_FILE_UPDATES = [
    Patch(lambda: management, name, lambda plain: lambda *args, **kwargs: None)
    for name in ("update_checkpoint_state_internal", "_delete_file_if_exists")
]


def write_once(world: World) -> None:
    """Have the chief alone write what all processes save to one path, from now on."""

    def writing(plain: Callable[..., Any]) -> Callable[..., Any]:
        def _write(self: Any, file_prefix: Any, options: Any = None) -> Any:
            def write() -> Any:
                return plain(self, file_prefix, options)

            if threading.current_thread() is not threading.main_thread():
                # An asynchronous save is at no fixed point of the program where others could wait.
                return write() if world.is_chief else file_prefix
            path = _as_chief(world, "tf.train.Checkpoint", file_prefix, write)
            if path is None:
                path = file_prefix
                _record(path, options)
            return path

        return _write

    def saving(plain: Callable[..., Any]) -> Callable[..., Any]:
        def save(obj: Any, export_dir: Any, *args: Any, **kwargs: Any) -> Any:
            def write() -> Any:
                return plain(obj, export_dir, *args, **kwargs)

            return _as_chief(world, "tf.saved_model.save", export_dir, write)

        return save

    Patch(lambda: checkpoints.Checkpoint, "_write", writing).apply()
    Patch(lambda: tf.saved_model, "save", saving).apply()


def _as_chief(world: World, what: str, path: Any, write: Callable[[], Any]) -> Any:
    # Imported late: it imports Keras, which must not happen while TensorFlow joins.
    from unisono.checkpoint.saving import write_as_chief

    return write_as_chief(world, f"{what} {os.fspath(path)}", write)


def _record(path: Any, options: Any) -> None:
    """Have a manager record a checkpoint that the chief has written, without touching files."""
    found = getattr(options, "experimental_write_callbacks", None) or []
    managers = [act for act in found if act.__module__ == management.__name__]
    with ExitStack() as stack:
        for patch in _FILE_UPDATES:
            stack.enter_context(patch.applied())
        for act in managers:
            act(path)
