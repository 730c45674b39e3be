"""Train a small convolutional net twice, on one device and on several, and compare the two.

    python -m unisono.recipes.digits --replicas 2 --output demo.png

Both runs start from the same weights and see the same samples in the same order, so they must end
in the same place up to rounding. Needs no download: the images come with the package.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import keras
import matplotlib
import numpy as np

import unisono
from unisono.devices import num_gpus
from unisono.recipes.digits_data import Split, load_digits

matplotlib.use("Agg")  # draws to a file, so no screen is needed
import matplotlib.pyplot as plt

GLOBAL_BATCH = 64  # samples per step over all replicas together
SEED = 7


def build_model() -> Any:
    # Chosen so that the two runs can be compared to the last digits: no dropout, whose masks would
    # differ, and a smooth activation and average pooling, since a ReLU or a maximum that rounding
    # tips the other way changes a whole gradient.
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Activation("silu"),
            keras.layers.Conv2D(64, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Activation("silu"),
            keras.layers.AveragePooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


class EpochTimer(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds.append(time.perf_counter() - self.start)


def train(model: Any, train_set: Split, test_set: Split, epochs: int) -> tuple[Any, float]:
    """Return the history of the run and its time per epoch in seconds."""
    x_train, y_train = train_set
    model.compile(
        optimizer=keras.optimizers.SGD(learning_rate=0.02, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    timer = EpochTimer()
    # Keras shuffles with NumPy's global generator; the same seed gives both runs the same order.
    keras.utils.set_random_seed(SEED)
    history = model.fit(
        x_train,
        y_train,
        batch_size=GLOBAL_BATCH,
        epochs=epochs,
        validation_data=test_set,
        callbacks=[timer],
        verbose=0,
    ).history
    # The first epoch includes compilation.
    return history, statistics.median(timer.seconds[1:] or timer.seconds)


def report(name: str, history: Any, epoch_s: float) -> None:
    accuracy = history["val_accuracy"][-1]
    print(f"{name}: test accuracy {accuracy:.2%}, {epoch_s:.2f} s per epoch", flush=True)


def plot(runs: dict[str, Any], path: str) -> None:
    figure, (loss_axes, accuracy_axes) = plt.subplots(1, 2, figsize=(11, 4.5))
    for (name, history), style, width in zip(runs.items(), ("-", "--"), (4.5, 1.8), strict=True):
        epochs = range(1, len(history["loss"]) + 1)
        for axes, key in ((loss_axes, "loss"), (accuracy_axes, "accuracy")):
            for prefix, part, colors in (
                ("", "train", ("#a6cee3", "#08519c")),
                ("val_", "test", ("#fdbf6f", "#b35806")),
            ):
                axes.plot(
                    epochs,
                    history[prefix + key],
                    style,
                    color=colors[style == "--"],
                    linewidth=width,
                    marker="o" if len(epochs) == 1 else None,
                    label=f"{part}, {name}",
                )
    loss_axes.set(xlabel="epoch", ylabel="loss", yscale="log", title="Loss")
    accuracy_axes.set(xlabel="epoch", ylabel="accuracy", title="Accuracy")
    for axes in (loss_axes, accuracy_axes):
        axes.grid(alpha=0.3)
        axes.legend()
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(f"Handwritten digits: {' and '.join(runs)}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m unisono.recipes.digits",
        description="Train on one device and on several, and compare the two.",
    )
    parser.add_argument("--replicas", type=int, help="default: every GPU, or 2 without GPUs")
    parser.add_argument("--output", default="demo.png", help="where to write the plot")
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args(arguments)

    num_visible_gpus = num_gpus()
    replicas = args.replicas or (None if num_visible_gpus else 2)
    num_replicas = replicas or num_visible_gpus
    several = "1 replica" if num_replicas == 1 else f"{num_replicas} replicas"
    train_set, test_set = load_digits()
    print(
        f"{len(train_set[0])} training and {len(test_set[0])} test images, "
        f"global batch {GLOBAL_BATCH}, {args.epochs} epochs, {keras.backend.backend()} backend",
        flush=True,
    )

    keras.utils.set_random_seed(SEED)
    plain_model = build_model()
    plain, plain_s = train(plain_model, train_set, test_set, args.epochs)
    plain_weights = plain_model.get_weights()
    report("one device", plain, plain_s)

    keras.utils.set_random_seed(SEED)
    model = unisono.parallel(build_model(), replicas=replicas)
    parallel, parallel_s = train(model, train_set, test_set, args.epochs)
    report(several, parallel, parallel_s)

    largest_difference = max(
        float(np.abs(a - b).max()) for a, b in zip(plain_weights, model.get_weights(), strict=True)
    )
    print(f"largest weight difference: {largest_difference:.1e}")
    if not num_visible_gpus:
        print("note: CPU replicas share the same cores, so compare times on GPUs")

    plot({"one device": plain, several: parallel}, args.output)
    print(f"plot: {args.output}")


if __name__ == "__main__":
    main()
