"""Saves over existing files and is killed meanwhile, again and again; tells what it then finds.

    python killed_saves.py FOLDER NUM_KILLS

Each attempt is a child that kills itself with SIGKILL when it opens, makes, renames or removes
something for the n-th time. The parent has only imported Keras, so that it can fork.
"""

import contextlib
import io
import json
import os
import signal
import sys
import tempfile
import zipfile
from pathlib import Path

import h5py
import keras
import numpy as np

import unisono

with contextlib.suppress(ImportError):
    import tensorflow as tf  # noqa: F401 - Keras imports it to save, where it is there: once

FOLDER, NUM_KILLS = Path(sys.argv[1]), int(sys.argv[2])
MODEL, WEIGHTS, INDEX = FOLDER / "m.keras", FOLDER / "m.weights.h5", FOLDER / "s.weights.json"
ROOTS = (str(FOLDER), tempfile.gettempdir())  # Keras opens the file, then makes a folder there.
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree"}
num_events = 0
die_at = None


def count(event: str, args: tuple[object, ...]) -> None:
    global num_events
    if event in EVENTS and str(args[0]).startswith(ROOTS):
        num_events += 1
        if num_events == die_at:
            os.kill(os.getpid(), signal.SIGKILL)


def save_all(value: int, at: int | None) -> None:
    layers = [keras.layers.Dense(64, name=name) for name in ("a", "b", "c")]
    model = unisono.parallel(keras.Sequential([keras.Input((64,)), *layers]), replicas=2)
    model.set_weights([np.full_like(weight, value) for weight in model.get_weights()])
    global num_events, die_at
    num_events, die_at = 0, at
    model.save(MODEL)
    model.save_weights(WEIGHTS)
    model.save_weights(INDEX, max_shard_size=20e3 / 2**30)


def in_child(value: int, at: int | None = None) -> tuple[int, int]:
    """How a child ended that saves, and the number of its events."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        save_all(value, at)
        os.write(writing, str(num_events).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        number = told.read()
    return os.waitpid(pid, 0)[1], int(number or 0)


def values_in(file: h5py.File) -> set[float]:
    found: set[float] = set()
    file.visititems(
        lambda name, item: found.update(np.unique(item)) if isinstance(item, h5py.Dataset) else None
    )
    return found


def saved() -> dict[str, list[float]]:
    """The values in each of the files, which are all the same where a save is whole."""
    with (
        zipfile.ZipFile(MODEL) as archive,
        h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as file,
    ):
        found = {"model": values_in(file)}
    with h5py.File(WEIGHTS) as file:
        found["weights"] = values_in(file)
    index = json.loads(INDEX.read_text())
    found["shards"] = set()
    for name in {each for names in index["weight_map"].values() for each in names}:
        with h5py.File(INDEX.with_name(name)) as file:
            found["shards"] |= values_in(file)
    return {name: sorted(map(float, values)) for name, values in found.items()}


def main() -> None:
    sys.addaudithook(count)
    assert in_child(1)[0] == 0
    ended, total = in_child(1)
    assert ended == 0
    kills = []
    for number in range(NUM_KILLS):
        at = 1 + number * (total - 1) // (NUM_KILLS - 1)
        ended, _ = in_child(2 + number, at)
        try:
            found = saved()
        except Exception as error:
            found = {"error": repr(error)}
        kills.append({"at": at, "ended": ended, "saved": found})
    names = sorted(path.name for path in FOLDER.iterdir())
    assert in_child(100)[0] == 0
    told = {"kills": kills, "left": names, "last": saved()}
    print(json.dumps(told | {"names": sorted(path.name for path in FOLDER.iterdir())}))


main()
