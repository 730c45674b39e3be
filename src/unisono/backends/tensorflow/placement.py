"""TensorFlow: ops of a scope, the devices of a tensor, and a line for each op that runs.

`tf.debugging.set_log_device_placement` acts only before TensorFlow starts, and is silent where its
log level is raised. The callback that its debugger uses sees ops that run eagerly at any time; the
ops inside a compiled step stay with TensorFlow's own log.
"""

from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework.op_callbacks import add_op_callback, remove_op_callback

from unisono.devices import Placement
from unisono.devices.locations import Location, location, name_of, num_bytes_of

_is_logging = False


def device_scope(placement: Placement) -> AbstractContextManager[None]:
    scope: AbstractContextManager[None] = tf.device(
        f"/device:{placement.kind.upper()}:{placement.indices[0]}"
    )
    return scope


def locate(value: Any) -> Location | None:
    if isinstance(value, keras.Variable):
        value = value._value
    if not isinstance(value, (tf.Tensor, tf.Variable)) or tf.is_symbolic_tensor(value):
        return None
    is_mirrored = isinstance(value, tf.distribute.DistributedValues)
    copies = list(value.values) if is_mirrored else [value]
    shape = tuple(copies[0].shape.as_list())
    num_bytes = num_bytes_of(shape, copies[0].dtype.size)
    return location(shape, num_bytes, {_name(copy.device): num_bytes for copy in copies})


def log_placement(is_on: bool) -> None:
    """Start or stop printing; twice is the same as once."""
    global _is_logging
    tf.debugging.set_log_device_placement(is_on)
    if is_on and not _is_logging:
        add_op_callback(_print_op)
    elif _is_logging and not is_on:
        remove_op_callback(_print_op)
    _is_logging = is_on


def _print_op(
    op_type: Any, inputs: Any, attrs: Any, outputs: Any, op_name: Any = None, graph: Any = None
) -> None:
    if graph is not None or not outputs:
        return  # Traced and not run, or without a result that could tell.
    name = op_type.decode() if isinstance(op_type, bytes) else op_type
    print(f"unisono: tensorflow ran {name} on {_name(outputs[0].device)}", flush=True)


def _name(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device)
    return name_of(spec.device_type.lower(), spec.device_index)
