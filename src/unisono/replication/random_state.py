"""The random generators that a Keras program draws from: seeds, and states as plain data.

`keras.utils.set_random_seed` imports TensorFlow wherever it is installed, for the sake of tf.data:
half a gigabyte and seconds in each process that trains on another backend.
"""

import contextlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from unisono import keras_internals
from unisono.errors import ModelError
from unisono.imports import after_import
from unisono.replication.exact_draws import is_exact
from unisono.replication.framework import framework

# Between the seeds of ranks. Large: torch adds the two words of a seed, so that seeds of neighbours
# must not run into each other.
SEED_STRIDE = 1_000_003


def seed_stride() -> int:
    """What is between the seeds of replicas: none if they draw the numbers of one device."""
    return 0 if is_exact() else SEED_STRIDE


def set_seed(seed: int) -> None:
    """Do what `keras.utils.set_random_seed` does, but seed TensorFlow when it is imported."""
    keras_internals.set_global_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    after_import("tensorflow", lambda tensorflow: tensorflow.random.set_seed(seed))
    with contextlib.suppress(ModelError):  # Keras' backend cannot train, and has no generators.
        framework().set_seed(seed)


def random_state() -> dict[str, Any]:
    """What Keras' shuffles draw from, as plain data."""
    name, keys, *rest = np.random.get_state()
    version, numbers, gauss = random.getstate()
    return {
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "python": [version, list(numbers), gauss],
        "framework": framework().random_state(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned, maybe in another process."""
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, "uint32"), *rest))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    framework().set_random_state(state["framework"])


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Undo what is drawn inside: processes must go on shuffling alike."""
    numpy, python, own = np.random.get_state(), random.getstate(), framework().random_state()
    try:
        yield
    finally:
        np.random.set_state(numpy)
        random.setstate(python)
        framework().set_random_state(own)
