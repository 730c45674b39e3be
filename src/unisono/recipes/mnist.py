"""A small convolutional net on MNIST: 60,000 handwritten digits, ten epochs, about 99 %.

python train.py --output plot.png --gpus 4
"""

from unisono import training

# Before Keras is imported: this chooses the backend and puts the replicas in their places.
run = training.begin(
    __doc__,
    name="mnist",
    epochs=10,
    batch_per_replica=64,
    learning_rate=0.02,
    warmup_epochs=1,
)

import keras
from keras import layers

import unisono
from unisono import schedules

run.prepare_keras()
(x_train, y_train), (x_test, y_test) = run.load("mnist", (28, 28, 1), num_classes=10)

model = keras.Sequential(
    [
        keras.Input((28, 28, 1), dtype="uint8"),
        layers.Rescaling(1 / 255),
        layers.Conv2D(16, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(10, dtype="float32"),
    ],
    name="mnist",
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
