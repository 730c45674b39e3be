"""What the GPU driver says of this machine, before and without any framework.

NVIDIA GPUs are read through NVML (`nvidia-ml-py`), which starts no CUDA and takes no memory. In a
container it lists the GPUs that were granted, and on WSL2 it is where Windows puts it. The
driver's files know less: they list all GPUs of the host in some containers, and none on WSL2.
Nothing here raises.
"""

import contextlib
import os
import pwd
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

_ROOT = Path("/")
_LISTED = "proc/driver/nvidia/gpus"
_WSL_NVML = "usr/lib/wsl/lib/libnvidia-ml.so.1"
_TRACES = {
    "dev/kfd": "AMD's GPU driver (/dev/kfd)",
    "dev/dxg": "WSL2's GPU device (/dev/dxg)",
    "dev/nvidiactl": "NVIDIA's device files (/dev/nvidiactl)",
    _LISTED: "NVIDIA's kernel module (/proc/driver/nvidia)",
}
_BITS = 64
_Value = TypeVar("_Value")


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
        index: The number of the device among those of its kind on this machine; MIG devices have
            that of their GPU.
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
        nearest_cores: Of a GPU: the cores of its own socket, where the driver knows them.
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
    nearest_cores: tuple[int, ...] = ()
    is_simulated: bool = False
    error: str | None = None

    @property
    def is_visible(self) -> bool:
        """Whether backends in this process can see it."""
        return self.visible_index is not None


@dataclass(frozen=True)
class Reading:
    """The GPUs that NVML lists, and where there are none the reason."""

    gpus: tuple[Device, ...] = ()
    """A GPU that is split into MIG devices is listed as these."""
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver supports."""
    reason: str | None = None


def read_driver() -> Reading:
    """Ask NVML for all GPUs of the machine, or of the container."""
    try:
        import pynvml
    except ImportError:
        return Reading(
            reason="nvidia-ml-py, a dependency of unisono, is not installed: "
            "pip install nvidia-ml-py"
        )
    try:
        _start(pynvml)
    except pynvml.NVMLError as error:
        return Reading(reason=f"the NVIDIA driver does not answer: {error}")
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        gpus = [each for i in range(pynvml.nvmlDeviceGetCount()) for each in _read(pynvml, i)]
        return Reading(
            tuple(gpus),
            driver,
            _cuda_version(pynvml),
            None if gpus else "the NVIDIA driver lists no GPU",
        )
    except pynvml.NVMLError as error:
        return Reading(reason=f"the NVIDIA driver does not list its GPUs: {error}")
    finally:
        pynvml.nvmlShutdown()


def traces() -> list[str]:
    """Signs of a GPU that need no library, in words; they say nothing about how many there are."""
    return [words for path, words in _TRACES.items() if (_ROOT / path).exists()]


def num_in_files() -> int:
    """The GPUs by the NVIDIA driver's files: the last resort, too many in some containers."""
    try:
        listed = len(list((_ROOT / _LISTED).iterdir()))
        granted = [path for path in (_ROOT / "dev").iterdir() if _is_gpu_file(path.name)]
    except OSError:
        return 0
    return min(listed, len(granted)) if granted else listed


def _is_gpu_file(name: str) -> bool:
    return name.startswith("nvidia") and name.removeprefix("nvidia").isdigit()


def _start(pynvml: Any) -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        import ctypes

        library = _ROOT / _WSL_NVML
        if not library.exists():
            raise
        # Loaded once, it is found by its name, wherever the loader looks.
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        pynvml.nvmlInit()


def _cuda_version(pynvml: Any) -> tuple[int, int] | None:
    try:
        number = int(pynvml.nvmlSystemGetCudaDriverVersion())
    except pynvml.NVMLError:
        return None
    return number // 1000, number % 1000 // 10


def _read(pynvml: Any, index: int) -> list[Device]:
    """One GPU, or its MIG devices. A query that it does not support is None, one that fails is
    its error."""
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

    def record(handle: Any) -> Device:
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
            nearest_cores=cores,
            error=errors[0] if errors else None,
        )

    handle = ask(pynvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return [Device(index, "gpu", "unknown", error=errors[0] if errors else None)]
    cores = _cores(_tried(pynvml, pynvml.nvmlDeviceGetCpuAffinity, handle, _num_words()))
    parts = _mig_handles(pynvml, handle)
    return [record(part) for part in parts] if parts is not None else [record(handle)]


def _mig_handles(pynvml: Any, handle: Any) -> list[Any] | None:
    """The MIG devices of a GPU; None where it is not split."""
    mode = _tried(pynvml, pynvml.nvmlDeviceGetMigMode, handle)
    if mode is None or not mode[0]:
        return None
    count = _tried(pynvml, pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    found = [
        _tried(pynvml, pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, i) for i in range(count)
    ]
    return [part for part in found if part is not None]


def _tried(pynvml: Any, query: Callable[..., _Value], *arguments: Any) -> _Value | None:
    """An answer that a GPU works without."""
    try:
        return query(*arguments)
    except pynvml.NVMLError:
        return None


def _num_words() -> int:
    """How long NVML's set of cores has to be."""
    return -(-(os.cpu_count() or 1) // _BITS)


def _cores(words: Any) -> tuple[int, ...]:
    return tuple(
        _BITS * i + bit
        for i, word in enumerate(words or ())
        for bit in range(_BITS)
        if int(word) >> bit & 1
    )


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
