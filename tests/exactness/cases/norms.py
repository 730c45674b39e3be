"""Normalization: statistics are those of the global batch, whatever slice a replica sees.

A bias before batch norm has a gradient that is zero in exact arithmetic, hence use_bias=False.
"""

from typing import Any

from keras import layers, optimizers

from exactness.case import Adopt, Group, Results
from exactness.exercise import (
    NUM_CLASSES,
    NUM_FEATURES,
    NUM_STEPS,
    NUM_TOKENS,
    images,
    numbers,
    split,
    stacked,
    tokens,
    train,
)

NORMS = Group("Normalization")
CROSSENTROPY = "sparse_categorical_crossentropy"


@NORMS.case("batch norm after a convolution (4-D)")
def batch_norm_conv(adopt: Adopt) -> Results:
    model = stacked(
        layers.Conv2D(3, 3, use_bias=False),
        layers.BatchNormalization(momentum=0.9),
        layers.ReLU(),
        layers.GlobalAveragePooling2D(),
        layers.Dense(NUM_CLASSES, activation="softmax"),
        shape=(6, 6, 2),
    )
    return train(adopt(model), images(), loss=CROSSENTROPY, metrics=["accuracy"])


@NORMS.case("batch norm after a dense layer (2-D)")
def batch_norm_dense(adopt: Adopt) -> Results:
    return train(adopt(normed_mlp()))


@NORMS.case("batch norm under Adam")
def batch_norm_adam(adopt: Adopt) -> Results:
    # The scale before a batch norm is nearly free: epsilon keeps Adam from following rounding.
    return train(adopt(normed_mlp()), optimizer=optimizers.Adam(0.01, epsilon=1e-3))


def normed_mlp(**options: Any) -> Any:
    return stacked(
        layers.Dense(5, use_bias=False),
        layers.BatchNormalization(momentum=0.8, **options),
        layers.Activation("tanh"),
        layers.Dense(2),
        shape=(NUM_FEATURES,),
    )


@NORMS.case("batch norm over another axis, without scale and center")
def batch_norm_axis(adopt: Adopt) -> Results:
    model = stacked(
        layers.Reshape((3, 2)),
        layers.BatchNormalization(axis=1, scale=False, center=False),
        layers.Flatten(),
        layers.Dense(2),
        shape=(NUM_FEATURES,),
    )
    return train(adopt(model))


@NORMS.case("masked batch norm after `Embedding(mask_zero=True)`")
def batch_norm_embedding(adopt: Adopt) -> Results:
    model = stacked(
        layers.Embedding(NUM_TOKENS, 3, mask_zero=True),
        layers.BatchNormalization(momentum=0.8),
        layers.GlobalAveragePooling1D(),
        layers.Dense(2),
        shape=(NUM_STEPS,),
        dtype="int32",
    )
    return train(adopt(model), tokens())


@NORMS.case("masked batch norm after `Masking`, slices without any valid step")
def batch_norm_masking(adopt: Adopt) -> Results:
    x = numbers(NUM_STEPS, 3, seed=6)
    x[::12] = x[1::12] = x[2::12] = x[3::12] = 0.0  # the first third of each global batch
    model = stacked(
        layers.Masking(),
        layers.BatchNormalization(momentum=0.8),
        layers.Flatten(),
        layers.Dense(2),
        shape=(NUM_STEPS, 3),
    )
    return train(adopt(model), split(x, numbers(2, seed=2)))


@NORMS.case("two batch norms, one of them frozen")
def batch_norm_frozen(adopt: Adopt) -> Results:
    frozen = layers.BatchNormalization(trainable=False)
    model = stacked(
        frozen,
        layers.Dense(5, use_bias=False),
        layers.BatchNormalization(),
        layers.Dense(2),
        shape=(NUM_FEATURES,),
    )
    return train(adopt(model))


@NORMS.case(
    "`BatchNormalization(synchronized=True)`",
    lacks=dict.fromkeys(("jax", "torch"), "Keras refuses `synchronized=True` off TensorFlow"),
)
def batch_norm_synchronized(adopt: Adopt) -> Results:
    return train(adopt(normed_mlp(synchronized=True)))


@NORMS.case("layer norm and group norm")
def layer_norm(adopt: Adopt) -> Results:
    # Wide enough that no group of features is nearly constant: Keras subtracts a squared mean from
    # a mean of squares, which then leaves rounding alone.
    model = stacked(
        layers.Dense(16),
        layers.LayerNormalization(),
        layers.Activation("tanh"),
        layers.GroupNormalization(groups=2),
        layers.Dense(2),
        shape=(NUM_FEATURES,),
    )
    return train(adopt(model))


@NORMS.case("spectral normalization")
def spectral_norm(adopt: Adopt) -> Results:
    model = stacked(
        layers.SpectralNormalization(layers.Dense(4)), layers.Dense(2), shape=(NUM_FEATURES,)
    )
    return train(adopt(model))
