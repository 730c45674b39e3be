"""Names of devices, and records of where values are stored.

One set of names for all backends: "cpu:0", "gpu:2". No framework is imported here: a backend
reports which of its devices hold a value, this module names them. With simulated GPUs the first CPU
devices stand in for GPUs and the CPU itself is the one after them, so that a value on the CPU is
told from one on GPU 0.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from unisono.devices import SIMULATED_GPUS, Placement, simulated_gpus
from unisono.errors import DeviceError

HOST = "host"
_NAME = re.compile(r"/?(?:device:)?(cpu|gpu|cuda)(?::([0-9]+))?", re.IGNORECASE)
_FORMS = '"cpu", "gpu" or "gpu:2"'


@dataclass(frozen=True)
class Location:
    """Where one value is stored: `device_bytes[i]` is its size on `devices[i]`.

    `layout` is "single", "replicated" (each device has a copy) or "sharded" (each has a shard).
    """

    path: str
    shape: tuple[int, ...]
    num_bytes: int
    devices: tuple[str, ...]
    device_bytes: tuple[int, ...]
    layout: str
    is_simulated: bool = False

    def __str__(self) -> str:
        name = f"{self.path}: " if self.path else ""
        return (
            f"{name}{self.layout} on {', '.join(self.devices)}{_note(self.is_simulated)}, "
            f"shape {self.shape}, {self.num_bytes} bytes"
        )


class Locations(tuple[Location, ...]):
    """Where each variable of a model is stored; prints as a table."""

    __slots__ = ()

    @property
    def total_bytes(self) -> dict[str, int]:
        """The sum of their sizes, by device."""
        totals: dict[str, int] = {}
        for record in self:
            for device, num_bytes in zip(record.devices, record.device_bytes, strict=True):
                totals[device] = totals.get(device, 0) + num_bytes
        return totals

    def __str__(self) -> str:
        rows = [("variable", "shape", "bytes", "devices", "layout")]
        for record in self:
            devices = ", ".join(record.devices)
            rows.append(
                (record.path, str(record.shape), str(record.num_bytes), devices, record.layout)
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [_aligned(row, widths) for row in rows]
        note = _note(any(record.is_simulated for record in self))
        totals = ", ".join(f"{device} {count}" for device, count in self.total_bytes.items())
        return "\n".join([*lines, f"bytes by device{note}: {totals or 'none'}"])


def location(
    shape: tuple[int, ...], num_bytes: int, on: Mapping[str, int], *, layout: str | None = None
) -> Location:
    """The location of a value that has `on[device]` bytes on each device.

    >>> str(location((2, 2), 16, {"cpu:0": 16}))
    'single on cpu:0, shape (2, 2), 16 bytes'
    """
    if layout is None:
        is_replicated = all(count == num_bytes for count in on.values())
        layout = "single" if len(on) == 1 else "replicated" if is_replicated else "sharded"
    is_simulated = simulated_gpus() > 0 and any(name.startswith("gpu") for name in on)
    return Location(
        "", tuple(shape), num_bytes, tuple(on), tuple(on.values()), layout, is_simulated
    )


def name_of(kind: str, index: int) -> str:
    """The name of a backend's device; the first CPU devices stand in for simulated GPUs.

    >>> name_of("cpu", 1)
    'cpu:1'
    """
    simulated = simulated_gpus() if kind == "cpu" else 0
    return f"gpu:{index}" if index < simulated else f"{kind}:{index - simulated}"


def names_of(placement: Placement) -> list[str]:
    """The names of the devices that replicas were given."""
    kind = "gpu" if placement.is_simulated else placement.kind
    return [f"{kind}:{index}" for index in placement.indices]


def num_bytes_of(shape: tuple[int, ...], bytes_per_item: int) -> int:
    return math.prod(shape) * bytes_per_item


def parse(name: object) -> tuple[str, int]:
    """A device's kind and id, by any of its usual names.

    >>> parse("/GPU:1"), parse("cuda:1"), parse("cpu")
    (('gpu', 1), ('gpu', 1), ('cpu', 0))
    """
    if not isinstance(name, str):
        raise DeviceError(
            f"Asked for device {name!r}; found a {type(name).__name__}. Give a name such as "
            f"{_FORMS}."
        )
    match = _NAME.fullmatch(name.strip())
    if match is None:
        raise DeviceError(
            f"Asked for device {name!r}, which names no device. Write it as {_FORMS}; ids are "
            "whole numbers from 0."
        )
    return match[1].lower().replace("cuda", "gpu"), int(match[2] or 0)


def find(name: str, *, num_gpus: Callable[[], int], num_cpus: int) -> Placement:
    """The device of a name; raises DeviceError where there is none.

    >>> find("cpu:1", num_gpus=lambda: 0, num_cpus=8)
    Placement(kind='cpu', indices=(1,), is_simulated=False, num_processes=1)
    """
    kind, index = parse(name)
    simulated = simulated_gpus()
    available = num_cpus if kind == "cpu" else num_gpus()
    if index >= available:
        raise DeviceError(f"Asked for device {name!r}; {_found(kind, index, available)}")
    if kind == "cpu":
        return Placement("cpu", (simulated + index,))
    return Placement("cpu" if simulated else "gpu", (index,), is_simulated=simulated > 0)


def _found(kind: str, index: int, available: int) -> str:
    if available:
        others = "" if kind == "cpu" else ', or take "cpu"'
        return f"this machine has {kind} {list(range(available))}. Choose among those{others}."
    return (
        'the backend sees no GPU on this machine. Take "cpu", or set '
        f"{SIMULATED_GPUS}={index + 1} to rehearse."
    )


def _note(is_simulated: bool) -> str:
    return " (simulated on the cpu)" if is_simulated else ""


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [
        cell.rjust(width) if i == 2 else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()
