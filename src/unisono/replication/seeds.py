"""Seeds what a Keras program draws from, without importing what the program does not use.

`keras.utils.set_random_seed` imports TensorFlow wherever it is installed, for the sake of tf.data:
half a gigabyte and seconds in each process that trains on another backend.
"""

import random

import keras
import numpy as np
from keras.src.backend.common.global_state import set_global_attribute
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED

from unisono.imports import after_import


def set_seed(seed: int) -> None:
    """As Keras' own, but TensorFlow is seeded when a program imports it."""
    set_global_attribute(GLOBAL_RANDOM_SEED, seed)
    set_global_attribute(GLOBAL_SEED_GENERATOR, None)  # Keras makes it anew from the seed.
    random.seed(seed)
    np.random.seed(seed)
    after_import("tensorflow", lambda tensorflow: tensorflow.random.set_seed(seed))
    if keras.backend.backend() == "torch":
        import torch

        torch.manual_seed(seed)
