"""Callbacks for Keras' `fit`, and where callbacks run in a run of several processes."""

import threading
from typing import Any, TypeVar

import keras

from unisono.devices import list_devices
from unisono.errors import ConfigurationError
from unisono.replication.callback_ranks import RANKS

__all__ = ["DeviceStats", "chief_only", "every_rank"]

_EVERY_S = 1.0
_Callback = TypeVar("_Callback")


def every_rank(callback: _Callback) -> _Callback:
    """Run a callback in every process of a run.

    A program's own callbacks, and those of Keras that may change the training, run in every process
    anyway. This is for a callback of another installed package that must run in all processes,
    because it calls `fit`, changes more of the model than its variables, or logs what each process
    does.

    Args:
        callback: A callback for `fit`, `evaluate` or `predict`.

    Returns:
        The callback itself.

    Raises:
        ConfigurationError: If `callback` is not a callback.

    Example:
        >>> import keras
        >>> log = every_rank(keras.callbacks.CSVLogger("log.csv"))
        >>> type(log).__name__
        'CSVLogger'
    """
    return _marked(callback, "every")


def chief_only(callback: _Callback) -> _Callback:
    """Run a callback in the first process of a run only, as Keras' loggers are.

    It may call `model.evaluate` and `model.predict` on data of its own, which then run in that
    process only. Variables that it writes (weights, the learning rate) and `stop_training` reach
    all processes before the next step.

    Args:
        callback: A callback for `fit`, `evaluate` or `predict`.

    Returns:
        The callback itself.

    Raises:
        ConfigurationError: If `callback` is not a callback.

    Example:
        >>> import keras
        >>> show = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch))
        >>> chief_only(show) is show
        True
    """
    return _marked(callback, "chief")


def _marked(callback: _Callback, ranks: str) -> _Callback:
    if not isinstance(callback, keras.callbacks.Callback):
        raise ConfigurationError(
            f"Asked where a callback runs; received {callback!r}. Pass an object of a callback's "
            'class, such as CSVLogger("log.csv").'
        )
    vars(callback)[RANKS] = ranks
    return callback


class DeviceStats(keras.callbacks.Callback):
    """Add each device's load and memory to the logs of an epoch, for CSVLogger and TensorBoard.

    `gpu_0_load` is the mean fraction of the time in which the GPU computed, `gpu_0_memory_gb` the
    peak of its memory in use; without GPUs they are the CPU's. Callbacks see the logs in their
    order, so list this one before those that write them.

    Args:
        every_s: The seconds between two measurements.

    Raises:
        ConfigurationError: If `every_s` is not a number above 0.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x, y = np.ones((8, 4)), np.ones((8, 1))
        >>> history = model.fit(x, y, callbacks=[DeviceStats()], verbose=0)
        >>> sorted(history.history)
        ['cpu_0_load', 'cpu_0_memory_gb', 'loss']
    """

    def __init__(self, *, every_s: float = _EVERY_S) -> None:
        super().__init__()
        is_number = isinstance(every_s, (int, float)) and not isinstance(every_s, bool)
        if not is_number or not every_s > 0:
            raise ConfigurationError(
                f"Asked for DeviceStats(every_s={every_s!r}). Give a number of seconds above 0."
            )
        self._every_s = every_s
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._loads: dict[str, list[float]] = {}
        self._bytes: dict[str, int] = {}
        self._times: tuple[float, float] | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._is_over.clear()
        self._times = _cpu_times()
        threading.Thread(target=self._sample_often, name="unisono-stats", daemon=True).start()

    def on_train_end(self, logs: Any = None) -> None:
        self._is_over.set()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._sample()
        with self._lock:
            if logs is not None:
                for name, loads in self._loads.items():
                    logs[f"{name}_load"] = sum(loads) / len(loads)
                for name, most in self._bytes.items():
                    logs[f"{name}_memory_gb"] = most / 1e9
            self._loads, self._bytes = {}, {}

    def _sample_often(self) -> None:
        while not self._is_over.wait(self._every_s):
            self._sample()

    def _sample(self) -> None:
        for device in list_devices().devices:
            if device.is_simulated:
                continue
            name = f"{device.kind}_{device.index}"
            load = self._cpu_load() if device.kind == "cpu" else device.utilisation
            with self._lock:
                if load is not None:
                    self._loads.setdefault(name, []).append(load)
                if device.total_bytes and device.free_bytes is not None:
                    used = device.total_bytes - device.free_bytes
                    self._bytes[name] = max(used, self._bytes.get(name, 0))

    def _cpu_load(self) -> float | None:
        before, self._times = self._times, _cpu_times()
        if before is None or self._times is None:
            return None
        busy, all_ = (now - then for now, then in zip(self._times, before, strict=True))
        return busy / all_ if all_ > 0 else 0.0


def _cpu_times() -> tuple[float, float] | None:
    """The time that all cores have worked, and in all, since the machine was started."""
    try:
        with open("/proc/stat") as file:
            counts = [float(word) for word in file.readline().split()[1:9]]
    except OSError:
        return None
    idle = counts[3] + counts[4]
    return sum(counts) - idle, sum(counts)
