"""The throughput of a small convolutional net on the processes of a run.

    unisono run --replicas N -m unisono.doctor.programs.speed RECORDS SECONDS

The batch of each replica is the same for any number of them, as it is in training, so that the
throughput of N replicas is N times that of one where nothing is lost.
"""

import sys
import time

import numpy as np

import unisono
from unisono.backends import load_backend
from unisono.doctor.programs.records import record

_CPU_BATCH, _GPU_BATCH = 32, 256
_STEPS = 8


def main() -> None:
    import keras

    seconds, facts = float(sys.argv[2]), unisono.topology()
    is_on_gpus = load_backend().num_gpus() > 0
    batch = (_GPU_BATCH if is_on_gpus else _CPU_BATCH) * facts.world_size
    keras.utils.set_random_seed(0)
    layers: list[keras.layers.Layer] = [keras.Input((32, 32, 3))]
    for filters in (32, 64, 128):
        layers += [keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)]
        layers += [keras.layers.BatchNormalization(), keras.layers.Activation("relu")]
        layers += [keras.layers.MaxPooling2D()]
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    model = unisono.parallel(keras.Sequential(layers))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss)
    rng = np.random.default_rng(0)
    x = rng.random((_STEPS * batch, 32, 32, 3), dtype=np.float32)
    y = rng.integers(0, 10, len(x))
    model.fit(x[:batch], y[:batch], batch_size=batch, verbose=0)  # Compiles.
    began = time.perf_counter()
    model.fit(x, y, batch_size=batch, verbose=0)
    # The same number in all processes. One call of `fit`: its start and its end are not the step.
    num_epochs = _agreed(max(2, min(100, round(seconds / (time.perf_counter() - began)))))
    times: list[float] = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: times.append(time.perf_counter()),
        on_train_end=lambda logs: times.append(time.perf_counter()),
    )
    model.fit(x, y, batch_size=batch, epochs=num_epochs, verbose=0, callbacks=[note])
    rates = len(x) / np.diff(times)
    if facts.is_chief:
        record(
            "speed",
            replicas=facts.world_size,
            samples_per_s=round(float(np.median(rates)), 1),
            spread=round(float(np.ptp(rates) / np.median(rates)), 3),
            is_on_gpus=is_on_gpus,
        )


def _agreed(value: int) -> int:
    """The chief's value, in all processes."""
    from unisono.launch.client import current_world

    world = current_world()
    return value if world is None else int(world.broadcast("doctor passes", value))


if __name__ == "__main__":
    main()
