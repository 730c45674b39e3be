"""MiniGoogLeNet on CIFAR-10: 50,000 small colour images, ten classes, 70 epochs.

    python train.py --output plot.png --gpus 4

The net and its training are those of a well-known tutorial, but for the learning rate, which grows
with the replicas after a warm-up, so that many of them lose no accuracy (see `--lr-scaling`).
"""

from unisono import training

# Before Keras is imported: this chooses the backend and puts the replicas in their places.
run = training.begin(
    __doc__,
    name="cifar10",
    epochs=70,
    batch_per_replica=64,
    learning_rate=5e-3,
    warmup_epochs=5,
)

import keras
import numpy as np
from keras import layers

import unisono
from unisono import schedules


def conv(x, filters, size, strides=1, padding="same"):
    x = layers.Conv2D(filters, size, strides=strides, padding=padding)(x)
    # A short memory, since what it keeps for evaluation must follow weights that move fast; of as
    # many images as on one replica.
    x = layers.BatchNormalization(momentum=0.8**run.num_replicas)(x)
    return layers.Activation("relu")(x)


def inception(x, filters_1x1, filters_3x3):
    return layers.Concatenate()([conv(x, filters_1x1, 1), conv(x, filters_3x3, 3)])


def downsample(x, filters):
    pooled = layers.MaxPooling2D(3, strides=2)(x)
    return layers.Concatenate()([conv(x, filters, 3, strides=2, padding="valid"), pooled])


def build_model(mean):
    """MiniGoogLeNet (Zhang et al. 2017), behind mean subtraction and augmentation.

    Both are layers, so they run on the device beside the net, and the saved file takes images as
    they are. The random ones are off in evaluation, and draw anew for each image of each replica.
    """
    images = keras.Input((32, 32, 3), dtype="uint8")
    x = layers.Normalization(axis=(1, 2, 3), mean=mean, variance=np.ones_like(mean))(images)
    x = layers.RandomTranslation(0.1, 0.1, fill_mode="nearest", seed=run.seed + 1)(x)
    x = layers.RandomFlip("horizontal", seed=run.seed + 2)(x)
    x = conv(x, 96, 3)
    x = inception(x, 32, 32)
    x = inception(x, 32, 48)
    x = downsample(x, 80)
    x = inception(x, 112, 48)
    x = inception(x, 96, 64)
    x = inception(x, 80, 80)
    x = inception(x, 48, 96)
    x = downsample(x, 96)
    x = inception(x, 176, 160)
    x = inception(x, 176, 160)
    x = layers.Flatten()(layers.AveragePooling2D(7)(x))
    x = layers.Dropout(0.5, seed=run.seed + 3)(x)
    outputs = layers.Dense(10, activation="softmax", dtype="float32")(x)
    return keras.Model(images, outputs, name="minigooglenet")


run.prepare_keras()
(x_train, y_train), (x_test, y_test) = run.load("cifar10", (32, 32, 3), num_classes=10)
y_train, y_test = (keras.utils.to_categorical(y, 10) for y in (y_train, y_test))

model = build_model(mean=x_train.mean(axis=0, dtype="float64").astype("float32"))
model = unisono.parallel(model, **run.devices)

num_steps = run.num_steps(len(x_train))
rate = schedules.PolynomialDecay(run.learning_rate, decay_steps=run.epochs * num_steps)
rate = schedules.for_replicas(
    rate, run.num_replicas, scaling=run.lr_scaling, warmup_steps=run.warmup_epochs * num_steps
)
model.compile(
    optimizer=keras.optimizers.SGD(rate, momentum=0.9),
    loss="categorical_crossentropy",
    metrics=["accuracy"],
)

with run.recording(model, num_samples=len(x_train)) as record:
    model.fit(
        x_train,
        y_train,
        batch_size=run.global_batch,
        epochs=run.num_epochs,
        validation_data=(x_test, y_test),
        callbacks=[record],
        verbose=0,
    )
