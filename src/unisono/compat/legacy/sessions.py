"""Settings of TensorFlow 1's sessions, read and handed to `unisono.configure`.

A session is its settings here: running one has no meaning in Keras 3, and says so.
"""

import importlib
from typing import Any, NoReturn

from unisono.compat.knowledge import SETTINGS
from unisono.compat.legacy.devices import set_limits, use_gpus
from unisono.compat.legacy.lines import announce, where
from unisono.compat.legacy.strategies import is_shared_out
from unisono.devices import num_gpus
from unisono.errors import LegacyError
from unisono.placement import log_placement


class Session:
    """What a program makes to say how many devices and how much memory it wants."""

    def __init__(self, target: str = "", graph: Any = None, config: Any = None) -> None:
        self.config = config
        if config is not None:
            apply(config)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *reason: object) -> None:
        """There is nothing to end."""

    def as_default(self) -> "Session":
        return self

    def close(self) -> None:
        """There is nothing to close."""

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
    """Put the settings of a `tf.ConfigProto` in force."""
    asked = _asked(config)
    gpus = asked.pop("gpus", None)
    if isinstance(gpus, int):
        # A session's number is the most it would take.
        gpus = list(range(min(gpus, num_gpus()))) or None
    if gpus and not (is_shared_out() and "gpu_options.visible_device_list" not in _set(config)):
        use_gpus(gpus)
    if asked:
        set_limits(**asked)
    if config.log_device_placement:
        log_placement()
    told = {"gpus": gpus, **asked} if gpus else asked
    shown = ", ".join(f"{name}={value!r}" for name, value in told.items())
    if told:
        announce("tensorflow.Session(config=...)", f"unisono.configure({shown})")


def v1() -> Any:
    """The part of TensorFlow that still has the names of version 1."""
    return importlib.import_module("tensorflow").compat.v1


def _asked(config: Any) -> dict[str, Any]:
    """The arguments of `configure` that a configuration means."""
    values = _set(config)
    asked: dict[str, Any] = {SETTINGS[field]: value for field, value in values.items()}
    if "gpu_options.visible_device_list" in values:
        text = values["gpu_options.visible_device_list"]
        asked["gpus"] = [int(part) for part in text.split(",")]
    if values.get("device_count.GPU") == 0 and num_gpus():
        raise LegacyError(
            f"{where()} asks a session for no GPU, which unisono.configure cannot say. Write "
            'os.environ["CUDA_VISIBLE_DEVICES"] = "-1" above all imports.'
        )
    if values.get("gpu_options.allow_growth"):
        asked["memory"] = "grow"
    return asked


def _set(config: Any) -> dict[str, Any]:
    """The fields of a configuration that are set, of those that mean something today."""
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
