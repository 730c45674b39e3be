"""`unisono devices`: this machine's devices and backends, and what `parallel` would use.

Imports no framework, so that it is quick and initializes no device.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
from collections.abc import Sequence
from typing import Any

from unisono.devices import (
    Device,
    Listing,
    Placement,
    choose,
    format_bytes,
    list_devices,
)
from unisono.errors import UnisonoError
from unisono.imports import keras_backend

_PACKAGES = {
    "jax": ("jax",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "torch": ("torch",),
}


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "devices", help="list devices and backends, and what parallel would use"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    listing = list_devices()
    placement = _placement(listing)
    print(_as_json(listing, placement) if options.json else _as_text(listing, placement))
    return 0


def backends() -> dict[str, str | None]:
    """The version of each backend; None where it is not installed."""
    return {
        backend: next(filter(None, map(_version, packages)), None)
        for backend, packages in _PACKAGES.items()
    }


def table(devices: Sequence[Device]) -> str:
    """The records as aligned columns."""
    rows = [("", "device", "name", "memory free", "busy", "used by"), *map(_row, devices)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def _placement(listing: Listing) -> Placement | str:
    """What `parallel` would use, or why it would raise."""
    try:
        return choose(replicas=None, gpus=None, num_visible_gpus=listing.num_visible_gpus)
    except UnisonoError as error:
        return str(error)


def _as_text(listing: Listing, placement: Placement | str) -> str:
    installed = [f"{name} {version or 'not installed'}" for name, version in backends().items()]
    lines = [table(listing.devices), "", *listing.notes]
    if listing.driver:
        lines.append(f"NVIDIA driver {listing.driver}")
    lines.append(f"Backends: {', '.join(installed)}")
    lines.append(f"Keras {_version('keras')} uses {_chosen_backend()}")
    if isinstance(placement, Placement):
        noun = "replica" if placement.num_replicas == 1 else "replicas"
        lines.append(f"unisono.parallel(model): {placement.num_replicas} {noun} on {placement}")
    else:
        lines.append(f"unisono.parallel(model) raises: {placement}")
    return "\n".join(lines)


def _chosen_backend() -> str:
    chosen, found = keras_backend(), backends()
    if found.get(chosen, "other") is not None:
        return f"{chosen} here"
    others = [name for name, version in found.items() if version]
    remedy = f"set KERAS_BACKEND={others[0]}" if others else f"pip install {chosen}"
    return f"{chosen} here, which is not installed: {remedy}"


def _as_json(listing: Listing, placement: Placement | str) -> str:
    report = {
        "devices": [
            {**dataclasses.asdict(device), "is_visible": device.is_visible}
            for device in listing.devices
        ],
        "notes": listing.notes,
        "driver": listing.driver,
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "backends": backends(),
        "keras": _version("keras"),
        "keras_backend": keras_backend(),
        "parallel": dataclasses.asdict(placement)
        if isinstance(placement, Placement)
        else {"error": placement},
    }
    return json.dumps(report, indent=2)


def _row(device: Device) -> tuple[str, ...]:
    sign = "" if device.is_visible else "hidden"
    where = f"{device.kind} {device.index}"
    name = f"{device.name}, {device.num_cores} core(s)" if device.num_cores else device.name
    if device.error:
        return ("fails", where, name, "?", "?", device.error)
    memory = "?"
    if device.free_bytes is not None and device.total_bytes is not None:
        memory = f"{format_bytes(device.free_bytes)} of {format_bytes(device.total_bytes)}"
    busy = "?" if device.utilisation is None else f"{device.utilisation:.0%}"
    users = (f"{process.user or 'unknown'} ({process.pid})" for process in device.processes)
    return (sign, where, name, memory, busy, ", ".join(users))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
