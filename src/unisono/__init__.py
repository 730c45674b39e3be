"""Train a Keras 3 model on many devices with one call, with the result of one device."""

import importlib as _importlib
import warnings as _warnings
from typing import Any as _Any

from unisono.devices import Device, devices
from unisono.errors import (
    ConfigurationError,
    DataError,
    LaunchError,
    ModelError,
    OutputError,
    Preempted,
    UnisonoError,
    WorkerError,
)
from unisono.joining import join as _join
from unisono.parallel import check_replicas, configure, parallel, release
from unisono.placement import device, log_placement, where
from unisono.reserve import reserve as _reserve
from unisono.spawn import spawn
from unisono.strategy import Strategy, compute_average_loss, scale_regularization_loss
from unisono.topology import Topology, topology

__version__ = "0.1.0"

_join()
_reserve()

# Imported at their first use: some import Keras, which a program may want to set up first.
_LAZY_MODULES = ("callbacks", "compat", "schedules", "testing")


# Exported by earlier releases; these classes are in `unisono.errors`.
_OLD_ERRORS = (
    "BenchError",
    "DeviceError",
    "DisagreementError",
    "LegacyError",
    "LegacyImportError",
    "PeerLostError",
    "SettingError",
    "SlurmError",
    "SourceError",
    "StartedError",
    "StrategyError",
    "VersionError",
)


def __getattr__(name: str) -> _Any:
    if name in _LAZY_MODULES:
        return _importlib.import_module(f"{__name__}.{name}")
    if name in _OLD_ERRORS:
        found = getattr(_importlib.import_module("unisono.errors"), name)
        _warnings.warn(
            f"unisono.{name} is deprecated: use unisono.errors.{found.__name__}",
            DeprecationWarning,
            stacklevel=2,
        )
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ConfigurationError",
    "DataError",
    "Device",
    "LaunchError",
    "ModelError",
    "OutputError",
    "Preempted",
    "Strategy",
    "Topology",
    "UnisonoError",
    "WorkerError",
    "check_replicas",
    "compute_average_loss",
    "configure",
    "device",
    "devices",
    "log_placement",
    "parallel",
    "release",
    "scale_regularization_loss",
    "spawn",
    "topology",
    "where",
]
