"""The nets that are measured, their per-replica batches, and data for them."""

from typing import Any

PER_REPLICA = {"digits": 32, "mnist": 256, "cifar10": 64}
NUM_STEPS = {"digits": 40, "mnist": 117, "cifar10": 4}
"""Of a pass: of the MNIST net an epoch of 60,000 images on two replicas."""
PIECES = ("cifar10",)
"""Nets of which a pass is a small piece of an epoch, which takes minutes."""


def make(name: str) -> Any:
    """A compiled net."""
    import keras

    from unisono.bench import minigooglenet, mnist_cnn

    if name == "mnist":
        return mnist_cnn.build()
    model = minigooglenet.build() if name == "cifar10" else _digits()
    optimizer = keras.optimizers.SGD(5e-3, momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def data(name: str, num_rows: int) -> tuple[Any, Any]:
    """Random images and labels, as NumPy arrays."""
    import numpy as np

    shape = {"digits": (8, 8, 1), "mnist": (28, 28, 1), "cifar10": (32, 32, 3)}[name]
    rng = np.random.default_rng(0)
    return rng.random((num_rows, *shape), dtype=np.float32), rng.integers(0, 10, num_rows)


def _digits() -> Any:
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(10, activation="softmax"),
        ]
    )
