"""A program for several processes: checks that run one after the other in one world.

`unisono run --replicas N world_program.py FOLDER`. Each process writes what its checks returned to
FOLDER/rank-R.json. A check that fails is told there as an error.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import keras
import numpy as np
from callbacks_program import QUICK as CALLBACKS
from custom_loops import BY_HAND, LOOPS, jax_guide_in_scope, stateful_fit

import unisono
from exactness.exercise import regression

FOLDER = Path(sys.argv[1])
RANK = unisono.topology().rank
TASK = regression()
OPENED: list[str] = []


def note_writes(event: str, arguments: Any) -> None:
    if event == "open" and isinstance(arguments[0], str):
        mode, path = arguments[1], arguments[0]
        is_written = isinstance(mode, str) and set(mode) & set("wax+")
        if is_written and path.startswith(str(FOLDER / "files")):
            OPENED.append(path)


def make(**options: Any) -> Any:
    keras.utils.set_random_seed(5 + RANK)  # The chief's weights win, whatever the others drew.
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", **options)
    return unisono.parallel(model)


def weights(model: Any) -> list[Any]:
    return [np.asarray(w, "float64").ravel().tolist() for w in model.get_weights()]


def fit(model: Any, **options: Any) -> dict[str, Any]:
    options = {"batch_size": 12, "epochs": 2, **options}
    history = model.fit(TASK.x, TASK.y, verbose=2, **options)
    return {"history": history.history, "weights": weights(model)}


class Callback(keras.callbacks.Callback):
    """Calls `act(self, batch)` after each batch."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act
        self.num_batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_batches += 1
        self.act(self, batch)


# -- checks --------------------------------------------------------------------------------------


def facts() -> Any:
    found = unisono.topology()
    return [found.rank, found.world_size, found.local_rank, found.node, found.is_chief]


def begins_with_the_chiefs_weights() -> Any:
    model = make()
    return {**fit(model), "predict": model.predict(TASK.x_test, verbose=0).tolist()}


def communication_threads() -> Any:
    """The cores of this process, and those of each thread that interrupts no other."""
    threads = map(int, os.listdir("/proc/self/task"))
    batch = [each for each in threads if os.sched_getscheduler(each) == os.SCHED_BATCH]
    return [sorted(os.sched_getaffinity(each)) for each in (0, *batch)]


def a_rank_may_compute_alone() -> Any:
    model = make()
    fit(model, epochs=1)
    if RANK == 0:  # Eager work on values of the model, in one process only.
        return float(keras.ops.sum(model.layers[0].kernel * 2.0))
    return None


def chief_changes_values() -> Any:
    def act(callback: Any, batch: int) -> None:
        if RANK == 0 and batch == 1:
            callback.model.optimizer.learning_rate.assign(0.003)
            kernel = callback.model.layers[0].kernel
            kernel.assign(keras.ops.zeros(kernel.shape))

    model = make()
    found = fit(model, callbacks=[Callback(act)], epochs=1)
    return {**found, "rate": float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))}


def others_do_not_win() -> Any:
    def act(callback: Any, batch: int) -> None:
        if RANK == 1:
            callback.model.stop_training = True
            callback.model.optimizer.learning_rate.assign(0.5)

    model = make()
    callback = Callback(act)
    fit(model, callbacks=[callback], epochs=1)
    rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
    return {"num_batches": callback.num_batches, "rate": rate, "weights": weights(model)}


def chief_stops() -> Any:
    def act(callback: Any, batch: int) -> None:
        callback.model.stop_training = RANK == 0 and batch == 1

    callback = Callback(act)
    model = make()
    fit(model, callbacks=[callback], epochs=3)
    return callback.num_batches


def early_stopping() -> Any:
    model = make()
    stop = keras.callbacks.EarlyStopping(monitor="loss", min_delta=100.0, patience=1)
    return len(fit(model, callbacks=[stop], epochs=5)["history"]["loss"])


def files() -> Any:
    folder = FOLDER / "files"
    folder.mkdir(exist_ok=True)
    sys.addaudithook(note_writes)
    callbacks = [
        keras.callbacks.ModelCheckpoint(str(folder / "best-{epoch}.keras")),
        keras.callbacks.CSVLogger(str(folder / "log.csv")),
        keras.callbacks.BackupAndRestore(str(folder / "backup"), delete_checkpoint=False),
    ]
    model = make()
    fit(model, callbacks=callbacks, validation_data=(TASK.x_test, TASK.y_test))
    model.save(folder / "model.keras")
    keras.saving.save_model(model, folder / "by-function.keras")
    is_there = all((folder / name).exists() for name in ("model.keras", "by-function.keras"))
    model.save_weights(folder / f"own-{RANK}.weights.h5")
    loaded = keras.saving.load_model(folder / "model.keras")
    return {
        "opened": sorted(os.path.basename(path) for path in OPENED),
        "is_there": is_there,
        "is_same": bool(np.array_equal(loaded.get_weights()[0], model.get_weights()[0])),
    }


def backup_is_restored() -> Any:
    folder = str(FOLDER / "files" / "backup")
    model = make()
    backup = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    return len(fit(model, callbacks=[backup], epochs=3)["history"]["loss"])


def random_states_that_differ() -> Any:
    model = make()
    np.random.seed(RANK)
    return fit(model, epochs=1)["history"]


def streams_that_differ() -> Any:
    def batches() -> Any:
        for i in range(4):
            x = TASK.x[i * 8 : i * 8 + 8]
            yield x + (RANK if i == 2 else 0), TASK.y[i * 8 : i * 8 + 8]

    return error_of(lambda: make().fit(batches(), verbose=0))


def rows_that_differ() -> Any:
    return error_of(lambda: make().fit(TASK.x[: 24 - RANK], TASK.y[: 24 - RANK], verbose=0))


def arrays_that_differ() -> Any:
    y = np.roll(TASK.y, RANK, axis=0)
    return error_of(lambda: make().fit(TASK.x, y, verbose=0))


def steps_that_differ() -> Any:
    def batches() -> Any:
        for i in range(4 - RANK):
            yield TASK.x[i * 8 : i * 8 + 8], TASK.y[i * 8 : i * 8 + 8]

    return error_of(lambda: make().fit(batches(), verbose=0))


def calls_that_differ() -> Any:
    model = make()
    call = model.evaluate if RANK else model.predict
    arguments = (TASK.x, TASK.y) if RANK else (TASK.x,)
    return error_of(lambda: call(*arguments, verbose=0))


def models_that_differ() -> Any:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2 + RANK)])
    model.compile("sgd", "mse")
    y = np.ones((24, 2 + RANK), "float32")
    return error_of(lambda: unisono.parallel(model).fit(TASK.x[:24], y, verbose=0))


def another_number_of_replicas() -> Any:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    return error_of(lambda: unisono.parallel(model, replicas=7))


def replicas_are_checked() -> Any:
    model = make()
    fit(model, epochs=1)
    same = unisono.check_replicas(model)
    kernel = model.layers[0].kernel
    kernel.assign(kernel + 0.5 * RANK)
    return [same, error_of(lambda: unisono.check_replicas(model))]


def custom_loop() -> Any:
    strategy = unisono.Strategy()
    loop = LOOPS[keras.backend.backend()]
    return [[np.asarray(p, "float64").tolist() for p in loop(strategy, rows)] for rows in (35, 33)]


def gradients_by_hand() -> Any:
    found = []
    for loop, how in BY_HAND[keras.backend.backend()]:
        results = loop(unisono.Strategy(), how=how)
        found.append([np.asarray(part, "float64").tolist() for part in results])
    return found


def guide_and_stateful_layer() -> Any:
    if keras.backend.backend() != "jax":
        return []
    found = [jax_guide_in_scope(unisono.Strategy()), stateful_fit(unisono.parallel)]
    return [[np.asarray(part, "float64").tolist() for part in results] for results in found]


def gradients_not_all_reduced() -> Any:
    if keras.backend.backend() == "jax":
        return "reduce_gradients"
    loop = BY_HAND[keras.backend.backend()][0][0]
    try:
        loop(unisono.Strategy(), how="not_all")
    except Exception as error:
        return str(error)
    return None


def a_scope_adopts() -> Any:
    keras.utils.set_random_seed(5 + RANK)
    with unisono.Strategy().scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    model.fit(TASK.x[:24], TASK.y[:24], batch_size=12, verbose=0)
    return unisono.check_replicas(model)


def loops_that_differ() -> Any:
    data = [(TASK.x[:8], TASK.y[:8])] * (3 - RANK)
    batches = unisono.Strategy().distribute_dataset(data)
    return error_of(lambda: [None for _ in batches])


def error_of(call: Any) -> str:
    try:
        call()
    except unisono.UnisonoError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


CHECKS = [
    facts,
    begins_with_the_chiefs_weights,
    communication_threads,
    a_rank_may_compute_alone,
    chief_changes_values,
    others_do_not_win,
    chief_stops,
    early_stopping,
    files,
    backup_is_restored,
    random_states_that_differ,
    streams_that_differ,
    rows_that_differ,
    arrays_that_differ,
    calls_that_differ,
    models_that_differ,
    another_number_of_replicas,
    replicas_are_checked,
    custom_loop,
    gradients_by_hand,
    guide_and_stateful_layer,
    a_scope_adopts,
    *CALLBACKS,
    # The processes take different paths here, so these come last.
    steps_that_differ,
    loops_that_differ,
    gradients_not_all_reduced,
]


def main() -> None:
    found = {}
    for check in CHECKS:
        try:
            found[check.__name__] = check()
        except Exception:
            found[check.__name__] = {"failed": traceback.format_exc()}
            break  # The processes may not be at the same place any more.
    (FOLDER / f"rank-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
