"""The nets of the rehearsal, compiled, with a batch of random rows for each.

Images are small and batches few rows: kernels, collectives and waits do not depend on either.
"""

from typing import Any

import keras
import numpy as np
from keras import layers

NETS = ("MiniGoogLeNet", "ResNet50", "LSTM", "transformer")
NUM_WORDS, LENGTH = 1000, 16


def make(name: str) -> Any:
    keras.utils.set_random_seed(1)
    model = {
        "MiniGoogLeNet": _minigooglenet,
        "ResNet50": _resnet50,
        "LSTM": _lstm,
        "transformer": _transformer,
    }[name]()
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def batch(name: str, num_rows: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, num_rows)
    if name in ("LSTM", "transformer"):
        return rng.integers(0, NUM_WORDS, (num_rows, LENGTH)), labels
    return rng.random((num_rows, 32, 32, 3), dtype=np.float32), labels


def _minigooglenet() -> Any:
    from unisono.bench.nets import minigooglenet

    return minigooglenet()


def _resnet50() -> Any:
    return keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10)


def _lstm() -> Any:
    return keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            layers.Embedding(NUM_WORDS, 64),
            layers.LSTM(128),
            layers.Dense(10, activation="softmax"),
        ]
    )


def _transformer(width: int = 64, num_blocks: int = 2) -> Any:
    words = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(NUM_WORDS, width)(words)
    for _ in range(num_blocks):
        attended = layers.MultiHeadAttention(4, width // 4)(x, x)
        x = layers.LayerNormalization()(layers.Add()([x, attended]))
        hidden = layers.Dense(4 * width, activation="gelu")(x)
        x = layers.LayerNormalization()(layers.Add()([x, layers.Dense(width)(hidden)]))
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(words, layers.Dense(10, activation="softmax")(x))
