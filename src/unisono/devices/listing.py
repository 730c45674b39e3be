"""Every device of this machine as records, before and without any framework."""

from dataclasses import dataclass

from unisono.devices.choice import num_gpus, simulated_gpus
from unisono.devices.cpu import cpu_name, memory_bytes, num_cores
from unisono.devices.nvml import Gpu, read_nvml
from unisono.devices.records import Device
from unisono.devices.visibility import Visibility, explain_order, read_visibility


@dataclass(frozen=True)
class Listing:
    """The devices of this machine, with what is to be said about them."""

    devices: tuple[Device, ...]
    driver: str | None
    """The version of the NVIDIA driver."""
    notes: tuple[str, ...]
    """Why there are no GPUs, what is hidden and by what."""
    num_visible_gpus: int = 0
    """As CUDA counts them: MIG parts, which have no record, count."""


def devices() -> list[Device]:
    """List this machine's GPUs, or its CPU where there is none; takes none of them into use.

    Hidden GPUs are listed too. The GPUs that `UNISONO_SIMULATED_GPUS` rehearses stand in for real
    ones, and a GPU that fails says so in its `error`.

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
    reading = read_nvml()
    if not reading.gpus:
        notes = [f"No GPU listed: {reading.reason}."]
        unlisted = num_gpus()
        if unlisted:
            notes.append(f"Yet /proc/driver/nvidia shows {unlisted} visible GPU(s).")
        return Listing((_cpu(),), reading.driver, tuple(notes), unlisted)
    visibility = read_visibility(len(reading.gpus), [gpu.uuid for gpu in reading.gpus])
    notes = visibility.explain() + explain_order([gpu.name for gpu in reading.gpus])
    records = [_record(gpu, visibility) for gpu in reading.gpus]
    if not visibility.entries:
        records.append(_cpu())
    return Listing(tuple(records), reading.driver, tuple(notes), len(visibility.entries))


def _record(gpu: Gpu, visibility: Visibility) -> Device:
    return Device(
        gpu.index,
        "gpu",
        gpu.name,
        gpu.uuid,
        gpu.total_bytes,
        gpu.free_bytes,
        gpu.utilisation,
        gpu.temperature_c,
        gpu.power_w,
        gpu.processes,
        visible_index=visibility.visible_index(gpu.index),
        error=gpu.error,
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
