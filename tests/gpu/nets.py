"""The nets of the rehearsal, with their batch size per GPU and data of the right shapes."""

from typing import Any

import numpy as np

NETS = ("minigooglenet", "resnet50", "lstm", "transformer")
PER_GPU = {"minigooglenet": 64, "resnet50": 64, "lstm": 64, "transformer": 32}


def make(name: str, image_size: int = 224) -> Any:
    """A compiled net; `image_size` is that of ResNet50."""
    import keras

    from unisono.bench.nets import minigooglenet

    if name == "minigooglenet":
        model = minigooglenet()
    elif name == "resnet50":
        model = keras.applications.ResNet50(weights=None, input_shape=(image_size, image_size, 3))
    elif name == "lstm":
        model = _lstm()
    else:
        model = _transformer()
    model.compile(keras.optimizers.Adam(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def data(name: str, num_rows: int, image_size: int = 224) -> tuple[Any, Any]:
    """Inputs and labels; their values do not matter."""
    labels = np.zeros(num_rows, "int32")
    if name == "transformer":
        return np.zeros((num_rows, 128), "int32"), labels
    resnet50 = (image_size, image_size, 3)
    shape = {"minigooglenet": (32, 32, 3), "resnet50": resnet50, "lstm": (50, 64)}[name]
    return np.zeros((num_rows, *shape), "float32"), labels


def _lstm() -> Any:
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((50, 64)),
            layers.LSTM(256, return_sequences=True),
            layers.LSTM(256),
            layers.Dense(10, activation="softmax"),
        ]
    )


def _transformer() -> Any:
    """Four blocks of width 256 over 128 tokens."""
    import keras
    from keras import layers

    tokens = keras.Input((128,), dtype="int32")
    positions = keras.ops.zeros_like(tokens) + keras.ops.arange(128, dtype="int32")
    x = layers.Embedding(8192, 256)(tokens) + layers.Embedding(128, 256)(positions)
    for _ in range(4):
        attended = layers.MultiHeadAttention(8, 32)(x, x)
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(attended))
        wide = layers.Dense(1024, activation="gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(256)(wide))
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, layers.Dense(10, activation="softmax")(x))
