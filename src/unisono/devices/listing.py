"""Every device of this machine as plain records, before and without any framework.

GPUs are read through NVML (`nvidia-ml-py`), which starts no CUDA and takes no memory. Nothing here
raises: a GPU that fails has the reason in its record, a machine without one has it in a note.
"""

import dataclasses
import os
import pwd
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from unisono.devices.choice import num_gpus, simulated_gpus
from unisono.devices.cpu import cpu_name, memory_bytes, num_cores
from unisono.devices.visibility import explain_order, read_visibility


@dataclass(frozen=True)
class Process:
    """A process that computes on a GPU; what is not known is None."""

    pid: int
    used_bytes: int | None = None
    user: str | None = None


@dataclass(frozen=True)
class Device:
    """One device of this machine, as `unisono.devices` lists it; what is not known is None.

    Args:
        index: The number of the device among those of its kind on this machine.
        kind: `"gpu"` or `"cpu"`.
        name: The model.
        uuid: The identifier that NVML and `CUDA_VISIBLE_DEVICES` use.
        total_bytes: The memory of the device.
        free_bytes: How much of it is free.
        utilisation: The fraction of the last second in which it computed, 0 to 1.
        temperature_c: In degrees Celsius.
        power_w: In watts.
        processes: The processes that use a GPU.
        visible_index: The number that backends, `parallel` and `configure` use, and None where
            `CUDA_VISIBLE_DEVICES` hides it.
        num_cores: Of a CPU: the cores that this process may use.
        is_simulated: Whether it is a CPU replica that stands in for a GPU.
        error: Why a GPU does not answer.

    Example:
        >>> Device(0, "gpu", "A100", visible_index=0).is_visible
        True
    """

    index: int
    kind: str
    name: str
    uuid: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    utilisation: float | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    processes: tuple[Process, ...] = ()
    visible_index: int | None = None
    num_cores: int | None = None
    is_simulated: bool = False
    error: str | None = None

    @property
    def is_visible(self) -> bool:
        """Whether backends in this process can see it."""
        return self.visible_index is not None


_Value = TypeVar("_Value")


@dataclass(frozen=True)
class _Reading:
    """The GPUs of the machine, and where there are none the reason."""

    gpus: tuple[Device, ...] = ()
    driver: str | None = None
    reason: str | None = None


def _read_nvml() -> _Reading:
    """Ask the driver for all GPUs of the machine; never raises."""
    try:
        import pynvml
    except ImportError:
        return _Reading(
            reason="nvidia-ml-py, a dependency of unisono, is not installed: "
            "pip install nvidia-ml-py"
        )
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return _Reading(reason=f"the NVIDIA driver does not answer: {error}")
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        gpus = tuple(_read(pynvml, i) for i in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        return _Reading(reason=f"the NVIDIA driver does not list its GPUs: {error}")
    finally:
        pynvml.nvmlShutdown()
    return _Reading(gpus, driver, None if gpus else "the NVIDIA driver lists no GPU")


def _read(pynvml: Any, index: int) -> Device:
    """One GPU. A query that it does not support is None, one that fails is its error."""
    errors: list[str] = []
    unsupported = (
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_NoPermission,
        pynvml.NVMLError_FunctionNotFound,  # A driver older than the binding.
    )

    def ask(query: Callable[..., _Value], *arguments: Any) -> _Value | None:
        try:
            return query(*arguments)
        except unsupported:
            return None
        except pynvml.NVMLError as error:
            errors.append(str(error))
            return None

    handle = ask(pynvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return Device(index, "gpu", "unknown", error=_first(errors))
    name = ask(pynvml.nvmlDeviceGetName, handle)
    uuid = ask(pynvml.nvmlDeviceGetUUID, handle)
    memory = ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    rates = ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    temperature = ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
    power_mw = ask(pynvml.nvmlDeviceGetPowerUsage, handle)
    running = ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return Device(
        index,
        "gpu",
        name or "unknown",
        uuid=uuid,
        total_bytes=int(memory.total) if memory else None,
        free_bytes=int(memory.free) if memory else None,
        utilisation=rates.gpu / 100 if rates else None,
        temperature_c=temperature,
        power_w=power_mw / 1000 if power_mw is not None else None,
        processes=tuple(
            Process(process.pid, process.usedGpuMemory, _user_of(process.pid))
            for process in running or ()
        ),
        error=_first(errors),
    )


def _first(errors: list[str]) -> str | None:
    return errors[0] if errors else None


def _user_of(pid: int) -> str | None:
    """Whose process it is; None for one that is gone or of another container."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@dataclass(frozen=True)
class Listing:
    """The devices of this machine, with notes about them."""

    devices: tuple[Device, ...]
    driver: str | None
    """The version of the NVIDIA driver."""
    notes: tuple[str, ...]
    """Why there are no GPUs, what is hidden and by what."""
    num_visible_gpus: int = 0
    """As CUDA counts them: MIG parts, which have no record, count."""


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
    reading = _read_nvml()
    if not reading.gpus:
        notes = [f"No GPU listed: {reading.reason}."]
        unlisted = num_gpus()
        if unlisted:
            notes.append(f"Yet /proc/driver/nvidia shows {unlisted} visible GPU(s).")
        return Listing((_cpu(),), reading.driver, tuple(notes), unlisted)
    visibility = read_visibility(len(reading.gpus), [gpu.uuid for gpu in reading.gpus])
    notes = visibility.explain() + explain_order([gpu.name for gpu in reading.gpus])
    records = [
        dataclasses.replace(gpu, visible_index=visibility.visible_index(gpu.index))
        for gpu in reading.gpus
    ]
    if not visibility.entries:
        records.append(_cpu())
    return Listing(tuple(records), reading.driver, tuple(notes), len(visibility.entries))


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
