"""ResNet50 with a head of its own, on a folder of images (one folder per class) or on CIFAR-10.

    python train.py --output plot.png --gpus 4 --data my_images

Images of a folder are read at 224 x 224, those of CIFAR-10 are brought to that size on the device.
"""

from unisono import training

# Before Keras is imported: this chooses the backend and puts the replicas in their places.
run = training.begin(
    __doc__,
    name="resnet50",
    epochs=30,
    batch_per_replica=32,
    learning_rate=0.01,
    warmup_epochs=3,
)

import keras
from keras import layers

import unisono
from unisono import schedules

IMAGE_SIZE = 224

run.prepare_keras()
(x_train, y_train), (x_test, y_test) = run.load(
    "cifar10", (32, 32, 3), folder_shape=(IMAGE_SIZE, IMAGE_SIZE, 3)
)
num_classes = int(max(y_train.max(), y_test.max())) + 1

images = keras.Input(x_train.shape[1:], dtype="uint8")
x = layers.Resizing(IMAGE_SIZE, IMAGE_SIZE)(images)
x = layers.Rescaling(1 / 127.5, offset=-1)(x)
x = layers.RandomFlip("horizontal", seed=run.seed + 1)(x)
# From scratch: weights="imagenet" would begin with trained ones, and wants that set's own scaling.
x = keras.applications.ResNet50(include_top=False, weights=None, pooling="avg")(x)
x = layers.Dense(256, activation="relu")(x)
x = layers.Dense(128, activation="relu")(x)
outputs = layers.Dense(num_classes, activation="softmax", dtype="float32")(x)
model = keras.Model(images, outputs, name="resnet50_with_head")
model = unisono.parallel(model, **run.devices)

num_steps = run.num_steps(len(x_train))
rate = schedules.PolynomialDecay(run.learning_rate, decay_steps=run.epochs * num_steps)
rate = schedules.for_replicas(
    rate, run.num_replicas, scaling=run.lr_scaling, warmup_steps=run.warmup_epochs * num_steps
)
model.compile(
    optimizer=keras.optimizers.SGD(rate, momentum=0.9),
    loss="sparse_categorical_crossentropy",
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
