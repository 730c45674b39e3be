"""`tf.config` for old programs: simulated GPUs are listed, choices go through `configure`.

A process of `unisono run` has one GPU. Programs that pin one by their local rank find as many in
the list as their node has processes, and their own is the one that they already have.
"""

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from unisono.compat.legacy.lines import where
from unisono.compat.legacy.strategies import is_shared_out
from unisono.devices import SIMULATED_GPUS, num_gpus, simulated_gpus
from unisono.errors import LegacyError, StartedError
from unisono.parallel import configure
from unisono.topology import topology


def list_devices_with(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`tf.config.list_physical_devices`, with the GPUs that this program may speak of."""

    def list_devices(device_type: str | None = None) -> list[Any]:
        found = list(plain(device_type))
        if device_type not in (None, "GPU") or not _has_own_list():
            return found
        return [device for device in found if device.device_type != "GPU"] + _gpus()

    return list_devices


def set_visible_devices_with(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`tf.config.set_visible_devices`, which hides GPUs from every backend."""

    def set_visible_devices(devices: Any, device_type: str | None = None) -> None:
        given = (
            list(devices)
            if isinstance(devices, (list, tuple)) and not _is_one(devices)
            else [devices]
        )
        gpus = [device for device in given if device.device_type == "GPU"]
        if device_type == "GPU" and not given:
            if simulated_gpus():
                os.environ[SIMULATED_GPUS] = "0"
            plain([], "GPU")
        elif gpus:
            use_gpus([_number(gpu.name) for gpu in gpus])
        else:
            plain(devices, device_type)

    return set_visible_devices


def set_memory_growth(device: Any, enable: bool) -> None:
    """Memory of GPUs, all of which have one policy."""
    set_limits(memory="grow" if enable else "all")


def divide_with(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`tf.config.set_logical_device_configuration`, by which programs limited a GPU's memory."""

    def divide(device: Any, logical_devices: Sequence[Any]) -> None:
        if device.device_type != "GPU":
            plain(device, logical_devices)
            return
        limits = [part.memory_limit for part in logical_devices]
        if len(limits) != 1 or limits[0] is None:
            raise LegacyError(
                f"{where()} makes {len(limits)} devices of one GPU, which can't be translated: a "
                "replica has a GPU of its own. Leave the line out, and rehearse with "
                f"{SIMULATED_GPUS}=2."
            )
        set_limits(memory=f"{limits[0]}MiB")

    return divide


def set_limits(**limits: Any) -> None:
    """`configure`, in a process that may have been given its limits when it was started."""
    try:
        configure(**limits)
    except StartedError as error:
        if not is_shared_out():
            raise
        if set(limits) == {"memory"} and (simulated_gpus() or not num_gpus()):
            return  # There is no memory to limit.
        options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in limits.items())
        raise LegacyError(
            f"{where()} limits what this process takes, after its devices were started by "
            f"`unisono run`. Start it with `unisono run {options}`, and leave the line out."
        ) from error


def use_gpus(ids: Sequence[int]) -> None:
    """Keep these GPUs, unless this process was given its own."""
    if not is_shared_out():
        configure(gpus=list(ids))
        return
    rank = topology().local_rank
    if list(ids) not in ([rank], [0], list(range(topology().local_size))):
        raise LegacyError(
            f"{where()} asks for GPUs {list(ids)} in a process with local rank {rank}, which "
            "`unisono run` has given a GPU of its own. Choose with `unisono run --gpus`, and leave "
            "the line out."
        )


def _has_own_list() -> bool:
    return bool(num_gpus()) and (is_shared_out() or bool(simulated_gpus()))


def _gpus() -> list[Any]:
    import tensorflow as tf

    count = topology().local_size if is_shared_out() else simulated_gpus()
    return [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(count)]


def _is_one(device: Any) -> bool:
    """A device of TensorFlow is a tuple itself."""
    return hasattr(device, "device_type")


def _number(name: str) -> int:
    match = re.search(r"(\d+)$", name)
    return int(match[1]) if match else 0
