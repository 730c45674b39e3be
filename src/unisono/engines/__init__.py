"""One engine per backend; a backend's own packages are imported only when it is chosen."""

import importlib

from unisono.engines.base import Adopted, Collectives, Engine, OwnLoop
from unisono.errors import ModelError
from unisono.versions import check_versions

__all__ = ["Adopted", "Collectives", "Engine", "OwnLoop", "load_engine"]

_ENGINES = {
    "jax": ("unisono.engines.jax_engine", "JaxEngine"),
    "tensorflow": ("unisono.engines.tensorflow_engine", "TensorFlowEngine"),
    "torch": ("unisono.engines.torch_engine", "TorchEngine"),
}


def load_engine(backend: str) -> Engine:
    """The engine for one of Keras' trainable backends."""
    if backend not in _ENGINES:
        raise ModelError(
            f"Keras runs on the {backend!r} backend, which cannot train. "
            f"Set KERAS_BACKEND to one of {', '.join(sorted(_ENGINES))}."
        )
    check_versions("keras", backend)
    module, name = _ENGINES[backend]
    engine: Engine = getattr(importlib.import_module(module), name)()
    return engine
