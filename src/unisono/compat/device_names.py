"""TensorFlow's names of devices, such as "/job:localhost/replica:0/task:0/device:GPU:0"."""

import re
from collections.abc import Sequence

from unisono.errors import DeviceError


def parse_devices(devices: Sequence[str]) -> tuple[str, list[int]]:
    """The kind and the ids that a list of names means; raises DeviceError."""
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
