"""Half precision, compared at its own resolution: the spacing of its numbers around 1.

Adam divides by the size of a gradient whose rounding error is that resolution, so an epsilon
above the noise keeps a single rounding from turning into a full step.
"""

import keras
from keras import layers, optimizers

from exactness.case import Adopt, Group, Results
from exactness.exercise import (
    NUM_CLASSES,
    Task,
    exercise,
    images,
    mlp,
    regression,
    sgd,
    stacked,
    train,
)

PRECISION = Group("Mixed precision")


@PRECISION.case("mixed_float16, loss scaling by Keras, SGD with momentum", resolution="float16")
def float16_sgd(adopt: Adopt) -> Results:
    keras.config.set_dtype_policy("mixed_float16")
    return train(adopt(mlp()), optimizer=sgd())


@PRECISION.case("mixed_float16, Adam with `global_clipnorm`", resolution="float16")
def float16_adam(adopt: Adopt) -> Results:
    keras.config.set_dtype_policy("mixed_float16")
    optimizer = optimizers.Adam(0.01, epsilon=0.1, global_clipnorm=0.5)
    return train(adopt(mlp()), optimizer=optimizer)


@PRECISION.case(
    "mixed_float16, steps skipped on overflow, scale halved and grown", resolution="float16"
)
def float16_overflow(adopt: Adopt) -> Results:
    keras.config.set_dtype_policy("mixed_float16")
    # Inputs are small: a gradient overflows by a sample's own part, never by the sum over a slice.
    plain = regression()
    task = Task(0.01 * plain.x, plain.y, 0.01 * plain.x_test, plain.y_test)
    model = adopt(stacked(layers.Dense(2, use_bias=False), shape=plain.x.shape[1:]))
    scaled = optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0**25, dynamic_growth_steps=4)
    model.compile(scaled, "mse")
    return exercise(model, task)


@PRECISION.case("mixed_bfloat16, SGD with momentum", resolution="bfloat16")
def bfloat16_sgd(adopt: Adopt) -> Results:
    keras.config.set_dtype_policy("mixed_bfloat16")
    return train(adopt(mlp()), optimizer=sgd())


@PRECISION.case("mixed_bfloat16, convolution and batch norm", resolution="bfloat16")
def bfloat16_conv(adopt: Adopt) -> Results:
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = stacked(
        layers.Conv2D(3, 3, use_bias=False),
        layers.BatchNormalization(),
        layers.GlobalAveragePooling2D(),
        layers.Dense(NUM_CLASSES, activation="softmax", dtype="float32"),
        shape=(6, 6, 2),
    )
    return train(
        adopt(model),
        images(),
        optimizer=optimizers.SGD(0.05),
        loss="sparse_categorical_crossentropy",
    )
