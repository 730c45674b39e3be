"""What the NVIDIA driver says of its GPUs, through NVML and its binding `nvidia-ml-py`.

NVML does not start CUDA, so asking it takes no memory and fixes nothing for a backend that starts
later. A machine without the binding or the driver has no GPUs, and the reason is kept.
"""

import os
import pwd
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from unisono.devices.records import Process

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Gpu:
    """What NVML tells of one GPU; `error` where the GPU does not answer."""

    index: int
    name: str = "unknown"
    uuid: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    utilisation: float | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    processes: tuple[Process, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Reading:
    """The GPUs of the machine, and where there are none the reason."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    reason: str | None = None


def read_nvml() -> Reading:
    """Ask the driver for all GPUs of the machine; never raises."""
    try:
        import pynvml
    except ImportError:
        return Reading(
            reason="nvidia-ml-py, a dependency of unisono, is not installed: "
            "pip install nvidia-ml-py"
        )
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Reading(reason=f"the NVIDIA driver does not answer: {error}")
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        gpus = tuple(_read(pynvml, i) for i in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        return Reading(reason=f"the NVIDIA driver does not list its GPUs: {error}")
    finally:
        pynvml.nvmlShutdown()
    return Reading(gpus, driver, None if gpus else "the NVIDIA driver lists no GPU")


def _read(pynvml: Any, index: int) -> Gpu:
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
        return Gpu(index, error=_first(errors))
    name = ask(pynvml.nvmlDeviceGetName, handle)
    uuid = ask(pynvml.nvmlDeviceGetUUID, handle)
    memory = ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    rates = ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    temperature = ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
    power_mw = ask(pynvml.nvmlDeviceGetPowerUsage, handle)
    running = ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return Gpu(
        index,
        name=name or "unknown",
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
