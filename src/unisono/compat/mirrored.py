"""`tf.distribute.MirroredStrategy` as scripts call it, on every backend."""

import re
from collections.abc import Sequence
from typing import Any

from unisono.devices import Placement
from unisono.errors import DeviceError
from unisono.launch.world import current_world
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


def parse_devices(devices: Sequence[str]) -> tuple[str, list[int]]:
    if isinstance(devices, str) or not devices:
        raise DeviceError(
            f'Asked for devices={devices!r}. Give a list of names, such as ["GPU:0", "GPU:1"].'
        )
    matches = [re.fullmatch(r"(?:.*[/:])?(gpu|cpu):(\d+)", str(name).lower()) for name in devices]
    if not all(matches):
        bad = [name for name, match in zip(devices, matches, strict=True) if match is None]
        raise DeviceError(f'Asked for devices {bad}, which are no names such as "GPU:0".')
    kinds = {match[1] for match in matches if match}
    ids = [int(match[2]) for match in matches if match]
    if len(kinds) > 1:
        raise DeviceError(f"Asked for GPUs and CPUs together: {list(devices)}. Choose one kind.")
    if kinds == {"cpu"} and sorted(ids) != list(range(len(ids))):
        raise DeviceError(
            f"Asked for CPU devices {list(devices)}. Name each once, from CPU:0 upwards."
        )
    return kinds.pop(), ids
