"""Which GPUs `CUDA_VISIBLE_DEVICES` leaves visible, read as CUDA itself reads it.

An entry is an index, a UUID or a unique prefix of one (`GPU-8932f937`), or the name of a MIG
instance, which is passed through. CUDA stops at the first entry that it cannot use, silently, and
sees no GPU where one is repeated; so what it does is reported here. CUDA reads the variable once,
when the first library of the process starts it, which may be long before a framework counts as
started: Keras' torch backend does it on import.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"


@dataclass(frozen=True)
class Visibility:
    """What a list of visible devices comes to on a machine with `num_gpus` GPUs."""

    text: str | None
    """The variable as it is set; None where it is not."""
    num_gpus: int
    entries: tuple[str, ...]
    """The entries that CUDA uses, in its order."""
    indices: tuple[int | None, ...]
    """The GPU behind each entry; None for a MIG part and where UUIDs are not known."""
    stopped_at: str | None = None
    """The entry that CUDA cannot use, if there is one."""
    is_repeating: bool = False

    def visible_index(self, index: int) -> int | None:
        """The number under which CUDA shows a GPU of the machine, or None."""
        return self.indices.index(index) if index in self.indices else None

    def explain(self) -> list[str]:
        """What the variable does here, in sentences; none where it is not set."""
        if self.text is None:
            return []
        shown = f"{VISIBLE}={self.text!r}"
        hidden = [i for i in range(self.num_gpus) if i not in self.indices]
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


def read_visibility(num_gpus: int, uuids: Sequence[str | None] | None = None) -> Visibility:
    """What the environment leaves visible of so many GPUs; without UUIDs those are believed."""
    text = os.environ.get(VISIBLE)
    if text is None:
        every = range(num_gpus)
        return Visibility(None, num_gpus, tuple(map(str, every)), tuple(every))
    entries: list[str] = []
    indices: list[int | None] = []
    stopped_at = None
    for entry in (part.strip() for part in text.split(",")):
        is_usable, index = _resolve(entry, num_gpus, uuids)
        if not is_usable:
            stopped_at = entry or None
            break
        if entry in entries or (index is not None and index in indices):
            return Visibility(text, num_gpus, (), (), is_repeating=True)
        entries.append(entry)
        indices.append(index)
    return Visibility(text, num_gpus, tuple(entries), tuple(indices), stopped_at)


def explain_order(names: Sequence[str]) -> list[str]:
    """A warning where CUDA may number GPUs of different make otherwise than the driver does."""
    if len(set(names)) < 2 or os.environ.get(ORDER) == "PCI_BUS_ID":
        return []
    return [
        "CUDA numbers GPUs of different make by speed, the driver by slot. Set "
        f"{ORDER}=PCI_BUS_ID, and the numbers are those shown here."
    ]


def _resolve(
    entry: str, num_gpus: int, uuids: Sequence[str | None] | None
) -> tuple[bool, int | None]:
    """Whether CUDA can use an entry, and the GPU that it means where that can be told."""
    if entry.isascii() and entry.isdigit():
        return int(entry) < num_gpus, int(entry)
    if entry.startswith("MIG-"):
        return True, None
    if not entry.startswith("GPU-"):
        return False, None
    if uuids is None:
        return True, None
    matching = [i for i, uuid in enumerate(uuids) if uuid and uuid.startswith(entry)]
    return (True, matching[0]) if len(matching) == 1 else (False, None)


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


_NOT_INITIALIZED = 3


def has_cuda_started() -> bool:
    """Whether the list of visible GPUs is fixed for this process."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes

    try:
        # NOLOAD: only a driver that another library has loaded.
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    count = ctypes.c_int()
    return bool(driver.cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALIZED)
