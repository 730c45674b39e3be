"""One engine per backend; a backend's own packages are imported only when it is chosen."""

import importlib

from unisono.backends.base import Adopted, Backend, Collectives, CustomLoop
from unisono.errors import ModelError
from unisono.versions import check_versions

__all__ = ["Adopted", "Backend", "Collectives", "CustomLoop", "load_backend"]

_ENGINES = {
    "jax": ("unisono.backends.jax.engine", "JaxBackend"),
    "tensorflow": ("unisono.backends.tensorflow.engine", "TensorFlowBackend"),
    "torch": ("unisono.backends.torch.engine", "TorchBackend"),
}


def load_backend(backend: str) -> Backend:
    """The engine for one of Keras' trainable backends."""
    if backend not in _ENGINES:
        raise ModelError(
            f"Keras runs on the {backend!r} backend, which cannot train. "
            f"Set KERAS_BACKEND to one of {', '.join(sorted(_ENGINES))}."
        )
    check_versions("keras", backend)
    module, name = _ENGINES[backend]
    engine: Backend = getattr(importlib.import_module(module), name)()
    return engine
