"""Which GPUs `CUDA_VISIBLE_DEVICES` leaves visible, read as CUDA itself reads it.

An entry is an index, a UUID or a unique prefix of one (`GPU-8932f937`), or the name of a MIG
device, which is passed through where NVML does not list it. CUDA stops at the first entry that it
cannot use, silently, and sees no GPU where one is repeated; so what it does is reported here. CUDA
reads the variable once, when the first library of the process starts it, which may be long before a
framework counts as started: Keras' torch backend does it on import.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.devices.driver import Device

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"


@dataclass(frozen=True)
class Visibility:
    """What a list of visible devices means on a machine with these GPUs."""

    text: str | None
    """The variable as it is set; None where it is not."""
    numbers: tuple[int, ...]
    """The driver's number of each GPU; that of a GPU with several MIG devices repeats."""
    entries: tuple[str, ...]
    """The entries that CUDA uses, in its order."""
    indices: tuple[int | None, ...]
    """The place among the GPUs of each entry; None where it is not known."""
    stopped_at: str | None = None
    """The entry that CUDA cannot use, if there is one."""
    is_repeating: bool = False

    def visible_index(self, index: int) -> int | None:
        """The number under which CUDA shows a GPU, or None."""
        return self.indices.index(index) if index in self.indices else None

    def explain(self) -> list[str]:
        """What the variable does, in sentences; none where it is not set."""
        if self.text is None:
            return []
        shown = f"{VISIBLE}={self.text!r}"
        hidden = [n for i, n in enumerate(self.numbers) if i not in self.indices]
        hidden = list(dict.fromkeys(hidden))
        lines = [f"{shown} hides GPU {_numbers(hidden)}." if hidden else f"{shown} hides no GPU."]
        if self.is_repeating:
            lines.append("It names a device twice, and CUDA then sees none.")
        elif self.stopped_at is not None:
            lines.append(
                f"CUDA stops at its entry {self.stopped_at!r}, which is no GPU of this machine."
            )
        parts = [entry for entry in self.entries if entry.startswith("MIG-")]
        if parts:
            lines.append(f"MIG parts are passed through as named: {', '.join(parts)}.")
        return lines


def read_visibility(gpus: Sequence[Device] | int) -> Visibility:
    """What the environment leaves visible of the GPUs; of a mere number, any UUID is believed."""
    text = os.environ.get(VISIBLE)
    numbers = tuple(range(gpus)) if isinstance(gpus, int) else tuple(gpu.index for gpu in gpus)
    uuids = None if isinstance(gpus, int) else [gpu.uuid or "" for gpu in gpus]
    if text is None:
        names = [
            uuids[i] if uuids and uuids[i].startswith("MIG-") else str(number)
            for i, number in enumerate(numbers)
        ]
        return Visibility(None, numbers, tuple(names), tuple(range(len(numbers))))
    entries: list[str] = []
    indices: list[int | None] = []
    stopped_at = None
    for entry in (part.strip() for part in text.split(",")):
        is_usable, index = _resolve(entry, numbers, uuids)
        if not is_usable:
            stopped_at = entry or None
            break
        if entry in entries or (index is not None and index in indices):
            return Visibility(text, numbers, (), (), is_repeating=True)
        entries.append(entry)
        indices.append(index)
    return Visibility(text, numbers, tuple(entries), tuple(indices), stopped_at)


def explain_mig(uuids: Sequence[str | None]) -> list[str]:
    """What a process sees of several MIG devices."""
    parts = [uuid for uuid in uuids if uuid and uuid.startswith("MIG-")]
    if len(parts) < 2:
        return []
    return [
        "CUDA shows a process one MIG device only: `unisono run` gives each process its own, "
        "`parallel` in one process uses one."
    ]


def explain_order(names: Sequence[str]) -> list[str]:
    """A warning where CUDA may number GPUs of different make otherwise than the driver does."""
    if len(set(names)) < 2 or os.environ.get(ORDER) == "PCI_BUS_ID":
        return []
    return [
        "CUDA numbers GPUs of different make by speed, the driver by slot. Set "
        f"{ORDER}=PCI_BUS_ID, and the numbers are those shown here."
    ]


def _resolve(
    entry: str, numbers: Sequence[int], uuids: Sequence[str] | None
) -> tuple[bool, int | None]:
    """Whether CUDA can use an entry, and the place of its GPU where that is known."""
    if entry.isascii() and entry.isdigit():
        place = next((i for i, number in enumerate(numbers) if number == int(entry)), None)
        return place is not None, place
    if not entry.startswith(("GPU-", "MIG-")):
        return False, None
    if uuids is None:
        return True, None
    matching = [i for i, uuid in enumerate(uuids) if uuid.startswith(entry)]
    if entry.startswith("MIG-") and not matching:
        return True, None  # Named in the old way, by its GPU and two numbers.
    return (True, matching[0]) if len(matching) == 1 else (False, None)


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


_NOT_INITIALIZED = 3


def has_cuda_started() -> bool:
    """Whether the list of visible GPUs is fixed for this process."""
    import ctypes

    try:
        # NOLOAD: only a driver that another library has loaded.
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    count = ctypes.c_int()
    return bool(driver.cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALIZED)
