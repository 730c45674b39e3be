"""`tf.distribute.MirroredStrategy` as scripts call it, on every backend."""

from collections.abc import Sequence
from typing import Any

from unisono.compat.device_names import parse_devices
from unisono.devices import Placement
from unisono.launch.client import current_world
from unisono.strategy import Strategy


class MirroredStrategy(Strategy):
    """TensorFlow's strategy of this name: a scope and the parts of own training loops.

    `devices` may be None (all GPUs), or names such as "GPU:0", "/gpu:1" or
    "/job:localhost/replica:0/task:0/device:GPU:0". `cross_device_ops` is accepted and has nothing
    left to choose.

    >>> MirroredStrategy(["CPU:0", "CPU:1"]).num_replicas_in_sync
    2
    """

    def __init__(self, devices: Sequence[str] | None = None, cross_device_ops: Any = None) -> None:
        if devices is None or current_world() is not None:
            super().__init__()  # In a run of several processes, devices are shared out already.
            return
        kind, ids = parse_devices(devices)
        if kind == "gpu":
            super().__init__(gpus=ids)
        else:
            self._use(Placement("cpu", tuple(ids)), sync_batch_norm=True)
