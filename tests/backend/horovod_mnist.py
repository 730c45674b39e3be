"""Horovod's example for Keras, examples/tensorflow2/tensorflow2_keras_mnist.py, as it is there.

Changed: the import; tf.keras' names to those of Keras 3, which has no experimental_run_tf_function;
checkpoints of weights, since h5 files of whole models are legacy. And, for a test: random images
in place of a download, fewer of them, a smaller net, fewer epochs, and the results told at the end.
"""

import json
import os
import sys

import keras
import numpy as np

import unisono.horovod.tensorflow.keras as hvd


def main():
    # Horovod: initialize Horovod.
    hvd.init()

    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        # Horovod: pin GPU to be used to process local rank (one GPU per process)
        gpus = tf.config.experimental.list_physical_devices("GPU")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        if gpus:
            tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

    rng = np.random.default_rng(hvd.rank())
    mnist_labels = rng.integers(0, 10, 256)
    mnist_images = rng.integers(0, 100, (256, 12, 12)) + 15 * mnist_labels[:, None, None]

    dataset = make_dataset(
        (mnist_images[..., np.newaxis] / 255.0).astype("float32"), mnist_labels.astype("int64")
    )

    mnist_model = keras.Sequential(
        [
            keras.layers.Conv2D(8, [3, 3], activation="relu"),
            keras.layers.MaxPooling2D(pool_size=(2, 2)),
            keras.layers.Dropout(0.25),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )

    # Horovod: adjust learning rate based on number of GPUs.
    scaled_lr = 0.001 * hvd.size()
    opt = keras.optimizers.Adam(scaled_lr)

    # Horovod: add Horovod DistributedOptimizer.
    opt = hvd.DistributedOptimizer(
        opt, backward_passes_per_step=1, average_aggregated_gradients=True
    )

    mnist_model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"]
    )

    callbacks = [
        # Horovod: broadcast initial variable states from rank 0 to all other processes.
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        # Horovod: average metrics among workers at the end of every epoch.
        hvd.callbacks.MetricAverageCallback(),
        # Horovod: scale the learning rate up during the first three epochs.
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
    ]

    # Horovod: save checkpoints only on worker 0 to prevent other workers from corrupting them.
    if hvd.rank() == 0:
        path = os.path.join(sys.argv[1], "checkpoint-{epoch}.weights.h5")
        callbacks.append(keras.callbacks.ModelCheckpoint(path, save_weights_only=True))

    # Horovod: write logs on worker 0.
    verbose = 1 if hvd.rank() == 0 else 0

    # Train the model.
    # Horovod: adjust number of steps based on number of GPUs.
    history = mnist_model.fit(
        dataset,
        steps_per_epoch=32 // hvd.size(),
        callbacks=callbacks,
        epochs=4,
        verbose=verbose,
    ).history
    weights = [np.asarray(w, "float64").ravel().tolist() for w in mnist_model.get_weights()]
    print()
    print(json.dumps({"weights": weights, "lr": history["lr"], "loss": history["loss"]}))


def make_dataset(images, labels):
    """The example's tf.data pipeline where there is TensorFlow, and the same in Python."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensor_slices((images, labels))
        return dataset.repeat().shuffle(10000).batch(32)

    def batches():
        while True:
            rows = np.random.choice(len(images), 32, replace=False)
            yield images[rows], labels[rows]

    return batches()


if __name__ == "__main__":
    main()
