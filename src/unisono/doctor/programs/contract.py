"""The exactness contract in short: what N replicas compute is what one device computes.

    python -m unisono.doctor.programs.contract RECORDS REFERENCE N
    unisono run --replicas N -m unisono.doctor.programs.contract RECORDS REFERENCE N

A small net with convolution and batch norm trains with Adam; the last batch of an epoch does not
divide. The first form trains on one device, twice, which gives the noise of the device itself,
saves the result as REFERENCE and compares N replicas in one process with it; the second compares
the processes of a run.
"""

import sys
from typing import Any

import numpy as np

import unisono
from unisono.doctor.programs.records import record
from unisono.launch.client import current_world

_SEED = 11
_EPOCHS = 2


def main() -> None:
    reference, num_replicas = sys.argv[2], int(sys.argv[3])
    if current_world() is not None:
        found = _train(num_replicas, is_parallel=True)
        if unisono.topology().is_chief:
            record("processes", **_difference(dict(np.load(reference)), found))
        return
    one = _train(num_replicas, is_parallel=False)
    np.savez(reference, **one)
    record("one device", **_difference(one, _train(num_replicas, is_parallel=False)))
    record("one process", **_difference(one, _train(num_replicas, is_parallel=True)))


def _train(num_replicas: int, *, is_parallel: bool) -> dict[str, Any]:
    """The weights, the optimizer's state and the losses after a few steps."""
    import keras

    keras.utils.set_random_seed(_SEED)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(8, 3, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.Activation("relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(4),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    if is_parallel:
        # Both ways have to use the same number, also where there are more GPUs than are checked.
        model = unisono.parallel(
            model, replicas=None if current_world() is not None else num_replicas
        )
    batch = 4 * num_replicas
    num_rows = 2 * batch + num_replicas + 1  # The last batch of an epoch does not divide.
    rng = np.random.default_rng(_SEED)
    x = rng.normal(size=(num_rows, 8, 8, 3)).astype("float32")
    y = rng.normal(size=(num_rows, 4)).astype("float32")
    history = model.fit(x, y, batch_size=batch, epochs=_EPOCHS, shuffle=False, verbose=0)
    if is_parallel:
        unisono.check_replicas(model)
    found = {
        f"{kind} {i}": keras.ops.convert_to_numpy(variable.value)
        for kind, variables in (("weight", model.weights), ("optimizer", model.optimizer.variables))
        for i, variable in enumerate(variables)
    }
    return found | {"loss": np.asarray(history.history["loss"])}


def _difference(expected: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The largest difference, relative for values above one, and where it is."""
    if expected.keys() != found.keys():
        return {"difference": float("inf"), "where": "the number of variables"}
    largest, where = 0.0, ""
    for name, value in expected.items():
        scale = np.maximum(1.0, np.abs(value))
        difference = float(np.max(np.abs(found[name] - value) / scale, initial=0.0))
        if np.isnan(difference):
            return {"difference": float("inf"), "where": name}
        if difference > largest:
            largest, where = difference, name
    return {"difference": largest, "where": where}


if __name__ == "__main__":
    main()
