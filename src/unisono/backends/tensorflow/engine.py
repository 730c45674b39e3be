"""The TensorFlow backend: devices, placement, and which trainer a model gets.

Replicas of one process are run by tf.distribute (mirrored), those of several processes as one
replica per process (multi_process).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from unisono.backends.tensorflow.collectives import TensorFlowCollectives
from unisono.backends.tensorflow.custom_loop import MirroredLoop, ProcessLoop, TensorFlowLoop
from unisono.backends.tensorflow.distributed import group_of
from unisono.backends.tensorflow.internals import add_op_callback, remove_op_callback
from unisono.backends.tensorflow.mirrored import MirroredTrainer, check_strategy
from unisono.backends.tensorflow.multi_process import ProcessTrainer
from unisono.backends.tensorflow.trainer import SingleReplica, Trainer
from unisono.devices import Placement
from unisono.devices.locations import Location, location, name_of, num_bytes_of
from unisono.errors import StartedError
from unisono.log import logger

_is_logging = False


class TensorFlowBackend:
    """See base.Backend."""

    def num_gpus(self) -> int:
        return len(tf.config.get_visible_devices("GPU"))

    def prepare(self, placement: Placement) -> None:
        count = max(placement.indices) + 1
        if placement.kind != "cpu" or count == 1:
            return
        found = len(tf.config.list_logical_devices("CPU"))
        if found < count:
            raise StartedError(
                f"Asked for {count} CPU replicas; TensorFlow has started with {found} CPU "
                f"device(s), and their number is fixed from then on. {_remedy(found, count)}"
            )

    def replicate(
        self, model: keras.Model, placement: Placement, *, sync_batch_norm: bool
    ) -> SingleReplica | Trainer:
        check_strategy(model)
        kind: type[SingleReplica | Trainer] = MirroredTrainer
        if placement.num_processes > 1:
            kind = ProcessTrainer
        elif placement.num_replicas == 1 and placement.indices == (0,):
            kind = SingleReplica
        return kind(model, placement, sync_batch_norm=sync_batch_norm)

    def custom_loop(self, placement: Placement) -> TensorFlowLoop:
        return (ProcessLoop if placement.num_processes > 1 else MirroredLoop)(placement)

    def collectives(self, ranks: Sequence[int] | None = None) -> TensorFlowCollectives:
        return TensorFlowCollectives(group_of(None if ranks is None else tuple(ranks)))

    def device_scope(self, placement: Placement) -> AbstractContextManager[None]:
        self.prepare(placement)
        scope: AbstractContextManager[None] = tf.device(
            f"/device:{placement.kind.upper()}:{placement.indices[0]}"
        )
        return scope

    def locate(self, values: Sequence[Any]) -> list[Location | None]:
        return [_locate(value) for value in values]

    def log_placement(self, is_on: bool) -> None:
        """Start or stop printing; twice is the same as once.

        `tf.debugging.set_log_device_placement` acts only before TensorFlow starts, and is silent
        where its log level is raised. The callback of its debugger sees ops that run eagerly at any
        time; ops inside a compiled step are left to TensorFlow's own log.
        """
        global _is_logging
        tf.debugging.set_log_device_placement(is_on)
        if is_on and not _is_logging:
            add_op_callback(_print_op)
        elif _is_logging and not is_on:
            remove_op_callback(_print_op)
        _is_logging = is_on


def _remedy(found: int, count: int) -> str:
    if found == 1:
        return (
            "Move `import unisono` above the first line that uses TensorFlow (building a model, "
            "making a tensor or a data set)."
        )
    return (
        f"Set UNISONO_REPLICAS={count} before the start, or, where the program itself calls "
        f"set_logical_device_configuration, ask for {count} there."
    )


def _locate(value: Any) -> Location | None:
    if isinstance(value, keras.Variable):
        value = value._value
    if not isinstance(value, (tf.Tensor, tf.Variable)) or tf.is_symbolic_tensor(value):
        return None
    is_mirrored = isinstance(value, tf.distribute.DistributedValues)
    copies = list(value.values) if is_mirrored else [value]
    shape = tuple(copies[0].shape.as_list())
    num_bytes = num_bytes_of(shape, copies[0].dtype.size)
    return location(shape, num_bytes, {_device_name(copy.device): num_bytes for copy in copies})


def _print_op(
    op_type: Any, inputs: Any, attrs: Any, outputs: Any, op_name: Any = None, graph: Any = None
) -> None:
    if graph is not None or not outputs:
        return  # Traced and not run, or without a result whose device is known.
    name = op_type.decode() if isinstance(op_type, bytes) else op_type
    logger.info(f"tensorflow ran {name} on {_device_name(outputs[0].device)}")


def _device_name(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device)
    return name_of(spec.device_type.lower(), spec.device_index)
