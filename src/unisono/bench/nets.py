"""The nets that are measured, their per-replica batch sizes, and random data for them.

`mnist` is bound by overhead; `cifar10` is MiniGoogLeNet for 32 x 32 images (Zhang et al. 2017),
bound by computation; `digits` is tiny, for a quick look.
"""

from typing import Any

PER_REPLICA = {"digits": 32, "mnist": 256, "cifar10": 64}
NUM_STEPS = {"digits": 40, "mnist": 117, "cifar10": 4}
"""Steps of a pass: for the MNIST net, an epoch of 60,000 images on two replicas."""
PIECES = ("cifar10",)
"""Nets whose passes are a few steps of an epoch, which would take minutes."""


def make(name: str) -> Any:
    """A compiled net."""
    import keras

    if name == "cifar10":
        model, loss, rate = minigooglenet(), "sparse_categorical_crossentropy", 5e-3
    elif name == "mnist":
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model, rate = _mnist(), 0.01
    else:
        model, loss, rate = _digits(), "sparse_categorical_crossentropy", 5e-3
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), loss, metrics=["accuracy"])
    return model


def data(name: str, num_rows: int) -> tuple[Any, Any]:
    """Random images and labels, as NumPy arrays."""
    import numpy as np

    shape = {"digits": (8, 8, 1), "mnist": (28, 28, 1), "cifar10": (32, 32, 3)}[name]
    rng = np.random.default_rng(0)
    return rng.random((num_rows, *shape), dtype=np.float32), rng.integers(0, 10, num_rows)


def minigooglenet(num_classes: int = 10) -> Any:
    """The uncompiled net, with 1,652,826 trainable parameters for ten classes."""
    import keras
    from keras import layers

    inputs = keras.Input((32, 32, 3))
    x = _conv(inputs, 96, 3)
    for narrow, wide in ((32, 32), (32, 48)):
        x = _inception(x, narrow, wide)
    x = _downsample(x, 80)
    for narrow, wide in ((112, 48), (96, 64), (80, 80), (48, 96)):
        x = _inception(x, narrow, wide)
    x = _downsample(x, 96)
    for narrow, wide in ((176, 160), (176, 160)):
        x = _inception(x, narrow, wide)
    x = layers.AveragePooling2D(7)(x)
    x = layers.Dropout(0.5)(x)
    outputs = layers.Dense(num_classes, activation="softmax")(layers.Flatten()(x))
    return keras.Model(inputs, outputs, name="minigooglenet")


def _conv(x: Any, filters: int, size: int, strides: int = 1, padding: str = "same") -> Any:
    from keras import layers

    x = layers.Conv2D(filters, size, strides=strides, padding=padding)(x)
    return layers.Activation("relu")(layers.BatchNormalization()(x))


def _inception(x: Any, narrow: int, wide: int) -> Any:
    from keras import layers

    return layers.Concatenate()([_conv(x, narrow, 1), _conv(x, wide, 3)])


def _downsample(x: Any, filters: int) -> Any:
    from keras import layers

    pooled = layers.MaxPooling2D(3, strides=2)(x)
    return layers.Concatenate()([_conv(x, filters, 3, strides=2, padding="valid"), pooled])


def _mnist() -> Any:
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


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
