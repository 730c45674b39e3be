"""The record of a training, as plain data: settings, versions, devices, and a row per epoch."""

import dataclasses
import importlib.metadata
import json
import math
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.devices import list_devices
from unisono.devices.cpu import cpu_name
from unisono.imports import keras_backend

if TYPE_CHECKING:
    from unisono.training.run import Run

_PACKAGES = ("unisono", "keras", "jax", "tensorflow", "torch", "numpy")


def describe_run(run: "Run", num_samples: int) -> dict[str, Any]:
    """All that is known before the first epoch."""
    return {
        "recipe": run.settings.recipe,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "backend": keras_backend(),
        "num_replicas": run.num_replicas,
        "global_batch": run.global_batch,
        "num_samples": num_samples,
        "learning_rate": run.describe(),
        "settings": dataclasses.asdict(run.settings),
        "versions": {"python": platform.python_version(), **_versions()},
        "devices": [dataclasses.asdict(device) for device in list_devices().devices],
        "cpu": cpu_name(),
        "num_processes": run.num_processes,
        "history": [],
    }


def to_json(record: dict[str, Any], path: Path) -> None:
    text = json.dumps(_plain(record), indent=2, default=str, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def _plain(value: Any) -> Any:
    """JSON has no word for what is not a number."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
