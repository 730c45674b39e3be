"""One package per Keras backend; frameworks are imported only when they are used."""

import functools
import importlib

from unisono.backends.base import (
    Backend,
    Build,
    Collectives,
    CustomLoop,
    Framework,
    ReplicatedModel,
)
from unisono.backends.jax.framework import JaxFramework
from unisono.backends.tensorflow.framework import TensorFlowFramework
from unisono.backends.torch.framework import TorchFramework
from unisono.errors import ModelError
from unisono.imports import check_versions, keras_backend
from unisono.replication.framework import register

__all__ = [
    "FRAMEWORKS",
    "Backend",
    "Build",
    "Collectives",
    "CustomLoop",
    "Framework",
    "ReplicatedModel",
    "load_backend",
    "load_framework",
]

FRAMEWORKS: dict[str, Framework] = {
    "jax": JaxFramework(),
    "tensorflow": TensorFlowFramework(),
    "torch": TorchFramework(),
}
_BACKENDS = {"jax": "JaxBackend", "tensorflow": "TensorFlowBackend", "torch": "TorchBackend"}


def load_framework(name: str | None = None) -> Framework:
    """The framework of one of Keras' trainable backends, or of the one that Keras uses.

    Raises:
        ModelError: Keras cannot train on that backend.
    """
    name = keras_backend() if name is None else name
    if name not in FRAMEWORKS:
        raise ModelError(
            f"Keras runs on the {name!r} backend, which cannot train. "
            f"Set KERAS_BACKEND to one of {', '.join(sorted(FRAMEWORKS))}."
        )
    return FRAMEWORKS[name]


def load_backend(name: str | None = None) -> Backend:
    """The implementation for one of Keras' trainable backends, or for the one that Keras uses.

    Raises:
        ModelError: Keras cannot train on that backend.
        ConfigurationError: Keras or the framework is newer than those that were tested.
    """
    found = load_framework(name).name
    check_versions("keras", found)
    return _load(found)


@functools.cache
def _load(name: str) -> Backend:
    module = importlib.import_module(f"unisono.backends.{name}.engine")
    backend: Backend = getattr(module, _BACKENDS[name])()
    return backend


register(load_framework)
