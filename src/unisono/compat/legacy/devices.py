"""Old ways to choose devices: strategies, `tf.config`, and sessions with their settings.

A process of `unisono run` has its devices already. Programs that pin a GPU by their local rank find
as many GPUs in the list as their node has processes, and keep the one that they have. Elsewhere
choices go through `unisono.configure`, and simulated GPUs are listed.
"""

import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from unisono.compat import multi_gpu
from unisono.compat.knowledge import METHODS, SETTINGS
from unisono.compat.legacy.lines import announce, where
from unisono.devices import SIMULATED_GPUS, num_gpus, simulated_gpus
from unisono.errors import LegacyError, StartedError
from unisono.parallel import configure, parallel
from unisono.placement import log_placement
from unisono.topology import topology

_WRITE = {method.old: method.write for method in METHODS}


def multi_gpu_model(
    model: Any,
    gpus: int | Sequence[int] | None = None,
    cpu_merge: bool = True,
    cpu_relocation: bool = False,
) -> Any:
    """`unisono.compat.multi_gpu_model`, also in a run of one process."""
    if has_own_devices():
        return parallel(model)
    return multi_gpu.multi_gpu_model(model, gpus, cpu_merge, cpu_relocation)


class MirroredStrategy(multi_gpu.MirroredStrategy):
    """`unisono.compat.MirroredStrategy` with its old methods, which are announced."""

    def __init__(self, devices: Sequence[str] | None = None, cross_device_ops: Any = None) -> None:
        super().__init__(None if has_own_devices() else devices, cross_device_ops)

    def experimental_run_v2(
        self,
        step: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        announce("strategy.experimental_run_v2", _WRITE["experimental_run_v2"])
        return self.run(step, args, kwargs)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        old = "experimental_distribute_dataset"
        announce(f"strategy.{old}", _WRITE[old])
        return self.distribute_dataset(dataset)


def has_own_devices() -> bool:
    """Whether a launcher has given this process its devices."""
    facts = topology()
    return facts.world_size > 1 or facts.launcher == "unisono"


def list_devices_with(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`tf.config.list_physical_devices`, with simulated GPUs and those of the node's processes."""

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
    """`tf.config.experimental.set_memory_growth`; all GPUs have one policy."""
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
                f"{where()} makes {len(limits)} devices of one GPU, which can't be translated: "
                "each replica has its own GPU. Leave the line out, and simulate GPUs with "
                f"{SIMULATED_GPUS}=2."
            )
        set_limits(memory=f"{limits[0]}MiB")

    return divide


def set_limits(**limits: Any) -> None:
    """`configure`, in a process that may have got its limits from the launcher."""
    try:
        configure(**limits)
    except StartedError as error:
        if not has_own_devices():
            raise
        if set(limits) == {"memory"} and (simulated_gpus() or not num_gpus()):
            return  # There is no GPU memory to limit.
        options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in limits.items())
        raise LegacyError(
            f"{where()} limits the resources of this process after `unisono run` has started its "
            f"devices. Start it with `unisono run {options}`, and leave the line out."
        ) from error


def use_gpus(ids: Sequence[int]) -> None:
    """Use these GPUs, unless the launcher has assigned one."""
    if not has_own_devices():
        configure(gpus=list(ids))
        return
    rank = topology().local_rank
    if list(ids) not in ([rank], [0], list(range(topology().local_size))):
        raise LegacyError(
            f"{where()} asks for GPUs {list(ids)} in a process with local rank {rank}, which "
            "got its own GPU from `unisono run`. Choose with `unisono run --gpus`, and leave "
            "the line out."
        )


def _has_own_list() -> bool:
    return bool(num_gpus()) and (has_own_devices() or bool(simulated_gpus()))


def _gpus() -> list[Any]:
    import tensorflow as tf

    count = topology().local_size if has_own_devices() else simulated_gpus()
    return [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(count)]


def _is_one(device: Any) -> bool:
    """A TensorFlow device is itself a tuple."""
    return hasattr(device, "device_type")


def _number(name: str) -> int:
    match = re.search(r"(\d+)$", name)
    return int(match[1]) if match else 0


class Session:
    """`tf.Session`: only its settings for devices and memory have an effect."""

    def __init__(self, target: str = "", graph: Any = None, config: Any = None) -> None:
        self.config = config
        if config is not None:
            apply(config)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *reason: object) -> None:
        """Nothing to end."""

    def as_default(self) -> "Session":
        return self

    def close(self) -> None:
        """Nothing to close."""

    def run(self, *fetches: Any, **options: Any) -> NoReturn:
        raise LegacyError(
            f"{where()} runs a session, which can't be translated: TensorFlow 2 computes eagerly, "
            "and Keras 3 builds no graph. Write the computation as plain calls of keras.ops or in "
            "model.fit; a session's settings are read, and go to unisono.configure(...)."
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self.run()


def set_session(session: Any) -> None:
    """`keras.backend.set_session`: the settings were applied when the session was made."""


def apply(config: Any) -> None:
    """Apply the settings of a `tf.ConfigProto`."""
    asked = _asked(config)
    gpus = asked.pop("gpus", None)
    if isinstance(gpus, int):
        # The number in a session is a maximum.
        gpus = list(range(min(gpus, num_gpus()))) or None
    if gpus and not (has_own_devices() and "gpu_options.visible_device_list" not in _set(config)):
        use_gpus(gpus)
    if asked:
        set_limits(**asked)
    if config.log_device_placement:
        log_placement()
    applied = {"gpus": gpus, **asked} if gpus else asked
    shown = ", ".join(f"{name}={value!r}" for name, value in applied.items())
    if applied:
        announce("tensorflow.Session(config=...)", f"unisono.configure({shown})")


def v1() -> Any:
    """TensorFlow's module with the names of version 1."""
    return importlib.import_module("tensorflow").compat.v1


def _asked(config: Any) -> dict[str, Any]:
    """The arguments of `configure` for a session's configuration."""
    values = _set(config)
    asked: dict[str, Any] = {SETTINGS[field]: value for field, value in values.items()}
    if "gpu_options.visible_device_list" in values:
        text = values["gpu_options.visible_device_list"]
        asked["gpus"] = [int(part) for part in text.split(",")]
    if values.get("device_count.GPU") == 0 and num_gpus():
        raise LegacyError(
            f"{where()} asks a session for no GPU, which unisono.configure cannot express. Write "
            'os.environ["CUDA_VISIBLE_DEVICES"] = "-1" above all imports.'
        )
    if values.get("gpu_options.allow_growth"):
        asked["memory"] = "grow"
    return asked


def _set(config: Any) -> dict[str, Any]:
    """The fields of a configuration that are set and have an equivalent."""
    options = config.gpu_options
    values = {
        "device_count.GPU": config.device_count.get("GPU"),
        "device_count.CPU": config.device_count.get("CPU"),
        "intra_op_parallelism_threads": config.intra_op_parallelism_threads or None,
        "gpu_options.per_process_gpu_memory_fraction": options.per_process_gpu_memory_fraction
        or None,
        "gpu_options.allow_growth": options.allow_growth or None,
        "gpu_options.visible_device_list": options.visible_device_list or None,
    }
    return {field: value for field, value in values.items() if value is not None}
