"""Train a Keras 3 model on many devices with one call, with the result of one device."""

from unisono.configuration import configure
from unisono.devices import Device, devices
from unisono.errors import (
    DeviceError,
    ModelError,
    StartedError,
    UnisonoError,
    WorkerError,
)
from unisono.parallel import parallel, release
from unisono.reserve import reserve as _reserve

__version__ = "0.1.0"

_reserve()

__all__ = [
    "Device",
    "DeviceError",
    "ModelError",
    "StartedError",
    "UnisonoError",
    "WorkerError",
    "configure",
    "devices",
    "parallel",
    "release",
]
