"""Programs for the processes of a JAX run: `python jax_world_program.py NAME FOLDER`.

What a program returns is written to FOLDER/rank-R.json.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import unisono

RANK = unisono.topology().rank
SIZE = unisono.topology().world_size
TYPES = """float16 float32 float64 bfloat16 int8 int16 int32 int64 uint8 uint16 uint32 uint64
bool""".split()  # noqa: SIM905
OPS = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}


def collectives(ranks: Any = None) -> Any:
    from unisono.backends import load_backend

    return load_backend("jax").collectives(ranks)


def differs(found: Any, expected: Any) -> bool:
    found, expected = np.asarray(found), np.asarray(expected)
    is_same_kind = (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return not is_same_kind or found.tobytes() != expected.tobytes()


def values_of(name: str) -> list[Any]:
    """Small whole numbers, which every type adds exactly, for each rank."""
    dtype = ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)
    most = 2 if name == "bool" else 5
    return [np.random.RandomState(r).randint(0, most, (5, 3)).astype(dtype) for r in range(SIZE)]


def all_types() -> list[str]:
    """Every collective with every type; the names of those that went wrong."""
    group, wrong = collectives(), []
    for name in TYPES:
        values = values_of(name)
        own = values[RANK]
        for op, function in OPS.items():
            expected = values[0]
            for value in values[1:]:
                expected = function(expected, value).astype(own.dtype)
            if differs(group.all_reduce([own], op)[0], expected):
                wrong.append(f"{op} {name}")
            bounds = [0, *np.cumsum([len(rows) for rows in np.array_split(own, SIZE)])]
            rows = expected[bounds[RANK] : bounds[RANK + 1]]
            if differs(group.reduce_scatter(own, op), rows):
                wrong.append(f"reduce_scatter {op} {name}")
        ragged = [np.concatenate([value] * (r + 1))[r:] for r, value in enumerate(values)]
        if any(map(differs, group.all_gather(ragged[RANK]), ragged)):
            wrong.append(f"gather {name}")
        if any(map(differs, group.all_gather(own[0, 0]), [value[0, 0] for value in values])):
            wrong.append(f"gather a scalar {name}")
        last = [values[-1], values[-1][0, 0]]
        if any(map(differs, group.broadcast([own, own[0, 0]], SIZE - 1), last)):
            wrong.append(f"broadcast {name}")
        splits = [[(r + to) % 3 for to in range(SIZE)] for r in range(SIZE)]
        sent = [np.arange(sum(s) * 2).reshape(-1, 2).astype(own.dtype) for s in splits]
        parts = [np.split(sent[r], np.cumsum(splits[r])[:-1])[RANK] for r in range(SIZE)]
        received, counts = group.all_to_all(sent[RANK], splits[RANK])
        if differs(received, np.concatenate(parts)) or counts != [len(part) for part in parts]:
            wrong.append(f"all_to_all {name}")
    return wrong


def bits() -> list[bool]:
    """Whether values that arithmetic would change arrive as they are."""
    group = collectives()
    odd = np.array([np.nan, -0.0, 1e-310, 1 / 3]) if RANK == 0 else np.ones(4)
    exact = group.all_reduce([np.array([1.0 + RANK * 2.0**-50])], "sum")[0]
    return [
        not differs(group.broadcast([odd], 0)[0], np.array([np.nan, -0.0, 1e-310, 1 / 3])),
        not differs(exact, np.array([SIZE + sum(range(SIZE)) * 2.0**-50])),
        not differs(group.all_gather(np.zeros((0, 2), "float32"))[0], np.zeros((0, 2), "float32")),
        not differs(group.all_reduce([2.0, np.zeros((0, 3))], "sum")[1], np.zeros((0, 3))),
    ]


def errors() -> list[str]:
    group = collectives()
    last = RANK == SIZE - 1
    calls = [
        lambda: group.all_reduce([np.zeros(2 + last, "float32")], "sum"),
        lambda: group.all_reduce([np.zeros(2, "float64" if last else "float32")], "sum"),
        lambda: group.all_gather(np.zeros((2, 2 + last), "float32")),
        lambda: group.barrier() if last else group.all_gather(np.zeros(2, "float32")),
        lambda: group.all_to_all(np.zeros(3, "float32"), [3] * SIZE),
        lambda: group.all_reduce([np.zeros(1)], "mean"),
    ]
    return [told(call) for call in calls]


def some_ranks() -> Any:
    """A collective of the first and the last process."""
    chosen = [0, SIZE - 1]
    if RANK not in chosen:
        return told(lambda: collectives(chosen))
    group = collectives(chosen)
    (total,) = group.all_reduce([np.float32(RANK + 1)], "sum")
    return [group.rank, group.size, float(total)]


def told(call: Any) -> str:
    try:
        return f"no error, but {call()}"
    except unisono.UnisonoError as error:
        return f"{type(error).__name__}: {error}"


def make(**options: Any) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Dense(8, activation="tanh"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.1), "mse", **options)
    return model


def train(model: Any) -> list[Any]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(23, 4)).astype("float32"), rng.normal(size=(23, 2)).astype("float32")
    before = model.predict(x[:5], verbose=0)  # Of a model that has not been built.
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x[:7], y[:7]))
    found = [before, *history.history.values(), model.predict(x, batch_size=8, verbose=0)]
    variables = [*model.variables, *model.optimizer.variables]
    return [np.asarray(part, "float64").tolist() for part in [*found, *variables]]


def training() -> list[Any]:
    return [train(unisono.parallel(make())), train(unisono.parallel(make(run_eagerly=True)))]


def values_stay_local() -> list[bool]:
    """Whether what a program can get hold of lies in this process alone."""
    model = unisono.parallel(make())
    train(model)
    values = [variable.value for variable in [*model.variables, *model.optimizer.variables]]
    return [all(value.is_fully_addressable for value in values)]


def replicas_agree() -> list[Any]:
    """After steps on a batch that each process computes, with other digits in each."""
    import keras
    from drifting import Drifting

    keras.utils.set_random_seed(1)
    layers = [keras.Input((4,)), keras.layers.Dense(3), Drifting(SIZE), keras.layers.Dense(1)]
    model = unisono.parallel(keras.Sequential(layers))
    model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(7, 4)).astype("float32")
    history = model.fit(x, x[:, :1], batch_size=7, epochs=2, verbose=0).history
    # Not after `fit`, at whose end all take over the chief's values.
    checksums = []
    agree = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: checksums.append(unisono.check_replicas(model))
    )
    model.fit(x, x[:, :1], batch_size=7, epochs=2, verbose=0, callbacks=[agree])
    return [history["loss"], checksums]


def all_collectives() -> dict[str, Any]:
    """What needs no model, in one run; the chief ends before the others have."""
    checks = [some_ranks, all_types, bits, errors]
    found = {check.__name__: check() for check in checks}
    if RANK > 0:
        time.sleep(2)
    return found


def all_training() -> dict[str, Any]:
    from jax._src import distributed

    # Something that outlives the program's own end, as a traceback or a cache may.
    sys.held = distributed.global_state.client  # type: ignore[attr-defined]
    return {check.__name__: check() for check in [training, values_stay_local, replicas_agree]}


def is_lost() -> list[Any]:
    """The last process is killed before a collective that the others wait in."""
    group = collectives()
    group.barrier()
    if RANK == SIZE - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    mesh = group._mesh
    start = time.monotonic()
    from unisono.backends.jax.mesh import peers_watched

    try:
        with peers_watched():
            for _ in range(100):
                mesh._replicate(mesh.put_rows(np.ones(8, "float32"))).block_until_ready()
    except unisono.errors.PeerLostError as error:
        return [str(error), time.monotonic() - start]
    return ["no error"]


def is_ended() -> list[Any]:
    """A process that is asked to end does, though JAX by itself would go on."""
    collectives().barrier()
    (FOLDER / f"pid-{RANK}").write_text(str(os.getpid()))
    time.sleep(60)
    return []


FOLDER = Path(sys.argv[-1])

if __name__ == "__main__":
    found = globals()[sys.argv[1]]()
    (FOLDER / f"rank-{RANK}.json").write_text(json.dumps(found))
