"""Embeddings, masks and recurrent layers: slices of a batch differ in their valid steps."""

from typing import Any

import keras
from keras import layers, optimizers

from exactness.case import Adopt, Group, Results
from exactness.exercise import (
    NUM_CLASSES,
    NUM_STEPS,
    NUM_TOKENS,
    Task,
    numbers,
    split,
    stacked,
    tagged_tokens,
    tokens,
    train,
)

SEQUENCES = Group("Embeddings, masks and recurrent layers")
CROSSENTROPY = "sparse_categorical_crossentropy"


@SEQUENCES.case("embedding under SGD with momentum")
def embedding_sgd(adopt: Adopt) -> Results:
    return train(adopt(embedded_mean()), tokens())


@SEQUENCES.case("embedding under Adam")
def embedding_adam(adopt: Adopt) -> Results:
    return train(adopt(embedded_mean()), tokens(), optimizer=optimizers.Adam(0.01))


@SEQUENCES.case("embedding under RMSprop, fewer rows than replicas", sharpest=2)
def embedding_rmsprop_one_row(adopt: Adopt) -> Results:
    x, y, *rest = tokens()
    task = Task(x[:13], y[:13], *rest)
    return train(adopt(embedded_mean()), task, optimizer=optimizers.RMSprop(0.01))


@SEQUENCES.case("embedding under `global_clipnorm`")
def embedding_clipped(adopt: Adopt) -> Results:
    clipped = optimizers.SGD(0.3, momentum=0.9, global_clipnorm=0.1)
    return train(adopt(embedded_mean()), tokens(), optimizer=clipped)


def embedded_mean() -> Any:
    return stacked(
        layers.Embedding(NUM_TOKENS, 4),
        layers.GlobalAveragePooling1D(),
        layers.Dense(2),
        shape=(NUM_STEPS,),
        dtype="int32",
    )


@SEQUENCES.case("GRU with a mask and a loss for each step")
def masked_gru(adopt: Adopt) -> Results:
    return train(
        adopt(tagger(layers.GRU(4, return_sequences=True))),
        tagged_tokens(),
        loss=CROSSENTROPY,
        metrics=["accuracy"],
    )


@SEQUENCES.case("LSTM with a mask and a loss for each step, under Adam")
def masked_lstm(adopt: Adopt) -> Results:
    return train(
        adopt(tagger(layers.LSTM(3, return_sequences=True))),
        tagged_tokens(),
        loss=CROSSENTROPY,
        optimizer=optimizers.Adam(0.02),
        weighted_metrics=["accuracy"],
    )


@SEQUENCES.case("bidirectional GRU with a mask, last state only")
def bidirectional(adopt: Adopt) -> Results:
    model = stacked(
        layers.Embedding(NUM_TOKENS, 3, mask_zero=True),
        layers.Bidirectional(layers.GRU(3)),
        layers.Dense(2),
        shape=(NUM_STEPS,),
        dtype="int32",
    )
    return train(adopt(model), tokens())


def tagger(recurrent: Any) -> Any:
    return stacked(
        layers.Embedding(NUM_TOKENS, 3, mask_zero=True),
        recurrent,
        layers.Dense(NUM_CLASSES, activation="softmax"),
        shape=(NUM_STEPS,),
        dtype="int32",
    )


@SEQUENCES.case("masked loss where slices have no valid step")
def masked_slices(adopt: Adopt) -> Results:
    x = numbers(NUM_STEPS, 3, seed=6)
    x[::12] = x[1::12] = x[2::12] = x[3::12] = 0.0
    model = stacked(layers.Masking(), layers.Dense(2), shape=(NUM_STEPS, 3))
    return train(adopt(model), split(x, numbers(NUM_STEPS, 2, seed=8)), metrics=["mae"])


@SEQUENCES.case("multi-head attention with a mask")
def attention(adopt: Adopt) -> Results:
    ids = keras.Input((NUM_STEPS,), dtype="int32")
    embedded = layers.Embedding(NUM_TOKENS, 4, mask_zero=True)(ids)
    mixed = layers.MultiHeadAttention(2, 2)(embedded, embedded)
    pooled = layers.GlobalAveragePooling1D()(mixed)
    return train(adopt(keras.Model(ids, layers.Dense(2)(pooled))), tokens())
