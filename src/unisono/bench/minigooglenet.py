"""MiniGoogLeNet for 32 x 32 images (Zhang et al. 2017): the net that is bound by computing."""

from typing import Any


def build(num_classes: int = 10) -> Any:
    """The uncompiled net, of 1,652,826 trainable parameters for ten classes."""
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
