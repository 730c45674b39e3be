"""Looks up names in the table of `knowledge.py`, and parses TensorFlow's device names."""

import re
from collections.abc import Sequence

from unisono.compat.knowledge import CHANGES, KERAS_HOMES, MODULES, TENSORFLOW_HOMES, Change
from unisono.errors import DeviceError

_BY_NAME = {change.old: change for change in CHANGES}


def canonical(dotted: str) -> str:
    """A dotted name as in the table, whichever package it was imported from.

    >>> canonical("tensorflow.keras.utils.multi_gpu_model")
    'keras.utils.multi_gpu_model'
    """
    for home in KERAS_HOMES:
        if dotted == home or dotted.startswith(home + "."):
            return "keras" + dotted.removeprefix(home)
    for home in TENSORFLOW_HOMES:
        if dotted == home or dotted.startswith(home + "."):
            return "tensorflow" + dotted.removeprefix(home)
    return dotted


def today(dotted: str) -> str:
    """A canonical name with a removed module replaced by its successor.

    >>> today("keras.utils.training_utils.multi_gpu_model")
    'keras.utils.multi_gpu_model'
    """
    module, _, rest = dotted, "", ""
    while module:
        if module in MODULES:
            return MODULES[module] + rest
        module, _, last = module.rpartition(".")
        rest = f".{last}{rest}"
    return dotted


def change_of(dotted: str) -> Change | None:
    """The entry for a name as it was written in a program; None if there is none."""
    name = canonical(dotted)
    return _BY_NAME.get(name) or _BY_NAME.get(today(name))


def gone_with(dotted: str) -> Change | None:
    """The entry that says why a name, or its module, has no successor."""
    name = canonical(dotted)
    while name:
        change = _BY_NAME.get(name)
        if change is not None and change.why is not None:
            return change
        name = name.rpartition(".")[0]
    return None


def parse_devices(devices: Sequence[str]) -> tuple[str, list[int]]:
    """The kind and the ids of names such as "/job:localhost/replica:0/task:0/device:GPU:0"."""
    if isinstance(devices, str) or not devices:
        raise DeviceError(
            f'Asked for devices={devices!r}. Give a list of names, such as ["GPU:0", "GPU:1"].'
        )
    matches = [re.fullmatch(r"(?:.*[/:])?(gpu|cpu):(\d+)", str(name).lower()) for name in devices]
    if not all(matches):
        bad = [name for name, match in zip(devices, matches, strict=True) if match is None]
        raise DeviceError(
            f'Asked for devices {bad}, not device names such as "GPU:0". Give GPUs or CPUs by id.'
        )
    kinds = {match[1] for match in matches if match}
    ids = [int(match[2]) for match in matches if match]
    if len(kinds) > 1:
        raise DeviceError(f"Asked for GPUs and CPUs together: {list(devices)}. Choose one kind.")
    if kinds == {"cpu"} and sorted(ids) != list(range(len(ids))):
        raise DeviceError(
            f"Asked for CPU devices {list(devices)}. Name each once, from CPU:0 upwards."
        )
    return kinds.pop(), ids
