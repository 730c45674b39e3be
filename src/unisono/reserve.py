"""Reserve virtual CPU devices before TensorFlow starts, for CPU replicas asked for later.

TensorFlow fixes its devices when it starts, and building a model starts it, while users build
first and call `parallel` after. So `import unisono` sets the number where TensorFlow is imported
but has not started, or right after it is imported. Nothing happens where TensorFlow then sees a GPU
or another Keras backend is chosen. The driver is not asked: `import unisono` is to load nothing.
"""

import contextlib
import sys
from typing import Any

from unisono.devices import default_replicas, simulated_gpus
from unisono.errors import DeviceError
from unisono.imports import after_import, keras_backend

_RESERVED_CPUS = 8


def reserve() -> None:
    """Arrange for TensorFlow to offer virtual CPU devices, now or when it is imported."""
    # A malformed variable is reported by the calls that use devices, not by the import.
    with contextlib.suppress(DeviceError):
        simulated_gpus()
        if keras_backend() != "tensorflow":
            return
        tensorflow = sys.modules.get("tensorflow")
        if tensorflow is None or hasattr(tensorflow, "config"):
            after_import("tensorflow", _configure)


def num_reserved() -> int:
    """How many CPU devices are set aside: enough for what the environment announces."""
    # One more than simulated GPUs: the CPU itself, for placement by hand.
    return max(_RESERVED_CPUS, default_replicas() or 0, simulated_gpus() + 1)


def _configure(tensorflow: Any) -> None:
    # Asked again: the program may have chosen a backend since `import unisono`.
    if keras_backend() != "tensorflow":
        return
    if tensorflow.config.list_physical_devices("GPU") and not simulated_gpus():
        return
    cpu = tensorflow.config.list_physical_devices("CPU")[0]
    if tensorflow.config.get_logical_device_configuration(cpu) not in (None, []):
        return  # The program has chosen for itself.
    configuration = tensorflow.config.LogicalDeviceConfiguration()
    # Already started: the backend reports it if CPU replicas are ever asked for.
    with contextlib.suppress(RuntimeError, DeviceError):
        tensorflow.config.set_logical_device_configuration(cpu, [configuration] * num_reserved())
