"""A training program for jobs: writes every rank's weights, and what its callbacks were told."""

import sys
import time
from pathlib import Path

import keras
import numpy as np

import unisono


def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(5)
    x = generator.normal(size=(56, 6)).astype("float32")
    return x, (x @ generator.normal(size=(6, 2))).astype("float32")


def net() -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.BatchNormalization()]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(2)])


def train(model: keras.Model, num_epochs: int, callbacks: list) -> None:
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    x, y = data()
    model.fit(x, y, batch_size=16, epochs=num_epochs, callbacks=callbacks, verbose=0)


class Slowly(keras.callbacks.Callback):
    """Leaves time for somebody to interrupt, and says when it may."""

    def on_train_batch_end(self, batch: int, logs=None) -> None:
        Path("under-way").touch()
        time.sleep(0.1)


class Saves(keras.callbacks.Callback):
    def on_preempt(self, logs) -> None:
        rank = unisono.topology().rank
        steps = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))
        with Path(f"told-{rank}").open("a") as file:
            file.write(f"{steps} {sorted(logs)}\n")
        self.model.save("saved.keras")


if __name__ == "__main__":
    how = sys.argv[1]
    model = unisono.parallel(net())
    if how == "briefly" or Path("saved.keras").exists():
        train(model, 2, [])
    else:
        train(model, 2000, [Slowly(), *([Saves()] if how == "saving" else [])])
    rank = unisono.topology().rank
    np.savez(f"rank-{rank}.npz", *model.get_weights())
    print("complete", unisono.topology().world_size, flush=True)
