"""The load of the machine's devices and processes, for `unisono top`.

GPUs by NVML, cores and processes by psutil, which only this command loads.
"""

import contextlib
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from unisono.devices import Device, list_devices


@dataclass(frozen=True)
class Usage:
    """The CPU and memory usage of one process."""

    pid: int
    command: str
    user: str
    cpu: float
    """In cores."""
    memory_bytes: int


@dataclass(frozen=True)
class Readings:
    """The machine at one moment."""

    devices: tuple[Device, ...]
    notes: tuple[str, ...] = ()
    cores: tuple[float, ...] = ()
    """The load of each core, 0 to 1."""
    usages: tuple[Usage, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read(pids: Iterable[int] = ()) -> Readings:
    """Read all devices, and the usage of these processes; a lost GPU has an error."""
    import psutil

    listing = list_devices()
    wanted = {*pids, *(p.pid for d in listing.devices for p in d.processes)}
    cores = tuple(load / 100 for load in psutil.cpu_percent(percpu=True))
    usages = [usage for pid in sorted(wanted) if (usage := _usage(pid)) is not None]
    return Readings(listing.devices, listing.notes, cores, tuple(usages))


_known: dict[int, Any] = {}


def _usage(pid: int) -> Usage | None:
    import psutil

    with contextlib.suppress(psutil.Error):
        # A process' load is measured between two readings of the same object.
        process = _known.setdefault(pid, psutil.Process(pid))
        if not process.is_running():
            del _known[pid]
            return None
        with process.oneshot():
            words = process.cmdline()
            return Usage(
                pid,
                " ".join(words)[:200] or process.name(),
                process.username(),
                process.cpu_percent() / 100,
                process.memory_info().rss,
            )
    _known.pop(pid, None)
    return None
