"""A small convolutional net on handwritten digits that come with the package: seconds.

    python train.py --output plot.png --replicas 2

With `--compare` it trains on one replica first, and shows the two side by side.
"""

from unisono import training

# Before Keras is imported: this chooses the backend and puts the replicas in their places.
run = training.begin(
    __doc__,
    name="digits",
    epochs=15,
    batch_per_replica=32,
    learning_rate=0.02,
    warmup_epochs=2,
)

import keras
from keras import layers

import unisono
from unisono import schedules
from unisono.recipes.digits_data import load_digits

run.prepare_keras()
(x_train, y_train), (x_test, y_test) = run.load(
    "digits", (8, 8, 1), num_classes=10, otherwise=load_digits
)

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(32, 3, padding="same", use_bias=False),
        layers.BatchNormalization(momentum=0.9),
        layers.Activation("relu"),
        layers.Conv2D(64, 3, padding="same", use_bias=False),
        layers.BatchNormalization(momentum=0.9),
        layers.Activation("relu"),
        layers.AveragePooling2D(2),
        layers.Flatten(),
        layers.Dense(10, dtype="float32"),
    ],
    name="digits",
)
model = unisono.parallel(model, **run.devices)

num_steps = run.num_steps(len(x_train))
rate = schedules.PolynomialDecay(run.learning_rate, decay_steps=run.epochs * num_steps)
rate = schedules.for_replicas(
    rate, run.num_replicas, scaling=run.lr_scaling, warmup_steps=run.warmup_epochs * num_steps
)
model.compile(
    optimizer=keras.optimizers.SGD(rate, momentum=0.9),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
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
