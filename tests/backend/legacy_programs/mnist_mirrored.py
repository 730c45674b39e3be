"""MNIST-like digits under a MirroredStrategy (TensorFlow 2.0, 2019)."""
import random
import sys

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers, models

BATCH_SIZE_PER_REPLICA = 16
EPOCHS = 2

if "--growth" in sys.argv:
    # Take only as much GPU memory as is needed.
    gpus = tf.config.experimental.list_physical_devices("GPU")
    if gpus:
        try:
            for gpu in gpus:
                tf.config.experimental.set_memory_growth(gpu, True)
            print(len(gpus), "Physical GPUs")
        except RuntimeError as e:
            # Memory growth must be set before GPUs have been initialized
            print(e)

random.seed(3)
np.random.seed(3)
images = np.random.rand(90, 8, 8, 1).astype("float32")
labels = np.random.randint(0, 10, 90)

strategy = tf.distribute.MirroredStrategy()
print("Number of devices: {}".format(strategy.num_replicas_in_sync))
BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync

with strategy.scope():
    model = models.Sequential([
        layers.Conv2D(4, 3, activation="relu", input_shape=(8, 8, 1)),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(16, activation="relu"),
        layers.Dense(10, activation="softmax"),
    ])
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=tf.keras.optimizers.Adam(lr=0.01),
        metrics=["acc"],
    )


class PrintLR(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch + 1, "lr", model.optimizer.lr.numpy(), "acc", logs["acc"])


model.fit(
    images, labels, batch_size=BATCH_SIZE, epochs=EPOCHS, shuffle=False, verbose=0,
    callbacks=[PrintLR()],
)
model.save_weights(sys.argv[1])
