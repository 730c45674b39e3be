"""Every device of this machine as plain records, before and without any framework.

Nothing here raises: a GPU that fails has the reason in its record, a machine without one has it in
a note.
"""

import dataclasses
from dataclasses import dataclass

from unisono.devices.choice import num_gpus, simulated_gpus
from unisono.devices.cpu import cpu_name, memory_bytes, num_cores
from unisono.devices.driver import Device, read_driver, traces
from unisono.devices.visibility import explain_mig, explain_order, read_visibility


@dataclass(frozen=True)
class Listing:
    """The devices of this machine, with notes about them."""

    devices: tuple[Device, ...]
    driver: str | None
    """The version of the NVIDIA driver."""
    notes: tuple[str, ...]
    """Why there are no GPUs, what is hidden and by what."""
    num_visible_gpus: int = 0
    """As many as `unisono run` can give a process each; CUDA shows a process one MIG device."""
    cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver supports."""


def devices() -> list[Device]:
    """List this machine's GPUs, or its CPU where there is none; initializes none of them.

    Hidden GPUs are listed too. Simulated GPUs (`UNISONO_SIMULATED_GPUS`) replace real ones, and a
    GPU that fails has the reason in its `error`: nothing is raised.

    Returns:
        A list of `Device` records.

    Example:
        >>> [device.visible_index for device in devices() if device.is_visible]
        [0...]
    """
    return list(list_devices().devices)


def list_devices() -> Listing:
    """The records of `devices`, and the notes that the command prints below them."""
    simulated = simulated_gpus()
    if simulated:
        note = f"UNISONO_SIMULATED_GPUS: {simulated} CPU replica(s) answer as GPUs."
        records = [_simulated(i) for i in range(simulated)]
        return Listing(tuple(records), None, (note,), simulated)
    reading = read_driver()
    if not reading.gpus:
        notes = [f"No GPU listed: {reading.reason}."]
        unlisted = num_gpus()
        if signs := traces():
            notes.append(f"Yet there is {' and '.join(signs)}: {unlisted} visible GPU(s).")
        return Listing((_cpu(),), reading.driver, tuple(notes), unlisted)
    visibility = read_visibility(reading.gpus)
    notes = [
        *visibility.explain(),
        *explain_order([gpu.name for gpu in reading.gpus if gpu.error is None]),
        *explain_mig([gpu.uuid for gpu in reading.gpus]),
    ]
    records = [
        dataclasses.replace(gpu, visible_index=visibility.visible_index(i))
        for i, gpu in enumerate(reading.gpus)
    ]
    if not visibility.entries:
        records.append(_cpu())
    return Listing(
        tuple(records), reading.driver, tuple(notes), len(visibility.entries), reading.cuda
    )


def _cpu() -> Device:
    total, free = memory_bytes()
    return Device(
        0,
        "cpu",
        cpu_name(),
        total_bytes=total,
        free_bytes=free,
        visible_index=0,
        num_cores=num_cores(),
    )


def _simulated(index: int) -> Device:
    total, free = memory_bytes()
    return Device(
        index,
        "gpu",
        "simulated on the cpu",
        total_bytes=total,
        free_bytes=free,
        visible_index=index,
        is_simulated=True,
    )
