"""Data and models of test_horovod.py, the same in all processes."""

import keras
import numpy as np

GLOBAL_BATCH = 8
FACTOR = 0.1915194503788923
SCALED = [-63.0, -62.0, -17.0, -1.0, 5.0, 42.0, 61.0, 63.0]
"""Twice of each fits into an int8."""
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.5),
    "clipped": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
    "adam": lambda: keras.optimizers.Adam(0.02),
    "accumulating": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}


def data():
    """Four global batches."""
    rng = np.random.default_rng(7)
    return rng.random((32, 4)).astype("float32"), rng.random((32, 1)).astype("float32")


def make_model():
    """The same model in all processes."""
    keras.utils.set_random_seed(3)
    layers = [keras.Input((4,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)]
    return keras.Sequential(layers)
