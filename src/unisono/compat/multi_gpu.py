"""`keras.utils.multi_gpu_model`, which Keras removed in 2020, and `MirroredStrategy`."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from unisono.compat.lookup import parse_devices
from unisono.devices import forced_replicas
from unisono.errors import DeviceError
from unisono.launch.client import current_world
from unisono.parallel import count_gpus, parallel, place_on_cpus
from unisono.strategy import Strategy

if TYPE_CHECKING:
    import keras


def multi_gpu_model(
    model: "keras.Model",
    gpus: int | Sequence[int] | None = None,
    cpu_merge: bool = True,
    cpu_relocation: bool = False,
) -> "keras.Model":
    """Replicate a model on several GPUs, as Keras 2.0.9 to 2.3.1 did; compile it afterwards.

    Args:
        model: A Keras model.
        gpus: The number of GPUs, or a list of their ids; by default every visible GPU.
        cpu_merge: Accepted and ignored.
        cpu_relocation: Whether to train a clone, which does not share the template's weights.

    Returns:
        The parallel model.

    Raises:
        DeviceError: If there are fewer than two GPUs, or GPUs that do not exist. It is a
            `ValueError`, so `try: ... except ValueError: pass` falls back to one device.

    Example:
        >>> import keras
        >>> template = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> multi_gpu_model(template, gpus=1)
        Traceback (most recent call last):
        ...
        unisono.errors.DeviceError: For multi-gpu usage to be effective, call `multi_gpu_model` \
with `gpus >= 2`. Received: `gpus=1`
    """
    if current_world() is not None or forced_replicas() is not None:
        return parallel(model)  # The launcher has assigned the devices, or `unisono verify`.
    if isinstance(gpus, str) or not isinstance(gpus, int | Sequence | None):
        return parallel(model, gpus=gpus)  # Raises an error that says what to give.
    available = count_gpus()
    ids = _gpu_ids(gpus, available)
    missing = [i for i in ids if i not in range(available)]
    if missing:
        raise DeviceError(
            f"To call `multi_gpu_model` with `gpus={gpus}`, we expect the following devices to be "
            f"available: {_names(ids)}. However this machine only has: "
            f"{_names(range(available))}. Try reducing `gpus`."
        )
    if cpu_relocation:
        import keras

        relocated = keras.models.clone_model(model)
        relocated.set_weights(model.get_weights())
        model = relocated
    return parallel(model, gpus=ids)


def _gpu_ids(gpus: int | Sequence[int] | None, available: int) -> list[int]:
    hint = "For multi-gpu usage to be effective, call `multi_gpu_model` with "
    if gpus and not isinstance(gpus, int):
        ids = list(gpus)
        if len(ids) < 2:
            raise DeviceError(f"{hint}`len(gpus) >= 2`. Received: `gpus={gpus}`")
        return ids
    count = gpus if isinstance(gpus, int) and gpus else available
    if count < 2:
        raise DeviceError(f"{hint}`gpus >= 2`. Received: `gpus={gpus or count}`")
    return list(range(count))


def _names(ids: Iterable[int]) -> list[str]:
    return ["/cpu:0", *(f"/gpu:{i}" for i in ids)]


class MirroredStrategy(Strategy):
    """TensorFlow's strategy of this name, on every backend.

    Args:
        devices: Names such as `"GPU:0"`, `"/gpu:1"` or
            `"/job:localhost/replica:0/task:0/device:GPU:0"`; by default all GPUs.
        cross_device_ops: Accepted and ignored.

    Raises:
        DeviceError: If a name is no device, or names a device that does not exist.

    Example:
        >>> MirroredStrategy(["CPU:0", "CPU:1"]).num_replicas_in_sync
        2
    """

    def __init__(self, devices: Sequence[str] | None = None, cross_device_ops: Any = None) -> None:
        if devices is None or current_world() is not None:
            super().__init__()  # The launcher has assigned the devices.
            return
        kind, ids = parse_devices(devices)
        if kind == "gpu":
            super().__init__(gpus=ids)
        else:
            self._use(place_on_cpus(len(ids)), sync_batch_norm=True)
