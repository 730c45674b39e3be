"""Callbacks: called once for each event, seeing what they see on one device, files written once."""

import contextlib
import csv
from pathlib import Path
from typing import Any

import keras
from keras import callbacks, optimizers

from exactness.case import Adopt, Group, Results, files_in, state_of, to_numpy
from exactness.exercise import exercise, fit, mlp, regression, sgd
from unisono.scratch import temporary_folder

CALLBACKS = Group("Callbacks")


def compiled(adopt: Adopt, optimizer: Any = None) -> Any:
    model = adopt(mlp())
    model.compile(optimizer or sgd(), "mse", metrics=["mae"])
    return model


def fit_with(model: Any, *watchers: Any, epochs: int = 5) -> Results:
    return exercise(model, callbacks=list(watchers), epochs=epochs)


class Diary(callbacks.Callback):
    """Writes down every event with its logs."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def note(self, event: str, index: Any = None, logs: Any = None) -> None:
        self.events.append([event, index, {k: float(v) for k, v in (logs or {}).items()}])

    def on_train_begin(self, logs: Any = None) -> None:
        self.note("train begins", None, logs)

    def on_train_end(self, logs: Any = None) -> None:
        self.note("train ends", None, logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.note("epoch begins", epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.note("epoch ends", epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.note("batch begins", batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note("batch ends", batch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        self.note("test begins", None, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note("test batch ends", batch, logs)

    def on_test_end(self, logs: Any = None) -> None:
        self.note("test ends", None, logs)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note("predict batch ends", batch)


@CALLBACKS.case("every event once, with the same logs")
def events(adopt: Adopt) -> Results:
    model, task, diary = compiled(adopt), regression(), Diary()
    held_out = (task.x_test, task.y_test)
    fit(model, task.x, task.y, epochs=2, validation_data=held_out, callbacks=[diary])
    model.evaluate(*held_out, batch_size=12, callbacks=[diary], verbose=0)
    model.predict(task.x_test, batch_size=12, callbacks=[diary], verbose=0)
    return {"events": diary.events}


class Meddler(callbacks.Callback):
    """Reads and sets the learning rate and the weights, and stops the training."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.9 * float(self.model.optimizer.learning_rate)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(self.model.get_weights())
        kernel = self.model.layers[1].kernel
        kernel.assign(0.5 * to_numpy(kernel))
        self.model.stop_training = epoch == 2


@CALLBACKS.case("own callback that sets learning rate, weights and `stop_training`")
def meddler(adopt: Adopt) -> Results:
    watcher = Meddler()
    return {"results": fit_with(compiled(adopt), watcher), "seen": watcher.seen}


@CALLBACKS.case("`LearningRateScheduler` and `LambdaCallback`")
def scheduler(adopt: Adopt) -> Results:
    rates: list[float] = []
    model = compiled(adopt)
    halve = callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    note = callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: rates.append(float(model.optimizer.learning_rate))
    )
    return {"rates": rates, **fit_with(model, halve, note)}


@CALLBACKS.case("`ReduceLROnPlateau`")
def plateau(adopt: Adopt) -> Results:
    reduce = callbacks.ReduceLROnPlateau(patience=1, min_delta=0.05, factor=0.3)
    return fit_with(compiled(adopt), reduce)


@CALLBACKS.case("`EarlyStopping` with the best weights restored")
def early_stopping(adopt: Adopt) -> Results:
    stop = callbacks.EarlyStopping("loss", patience=1, min_delta=0.08, restore_best_weights=True)
    return {"results": fit_with(compiled(adopt), stop, epochs=12), "stopped": stop.stopped_epoch}


@CALLBACKS.case("`TerminateOnNaN`")
def terminate_on_nan(adopt: Adopt) -> Results:
    task = regression()
    task.y[30] = float("nan")
    model = compiled(adopt)
    history = fit(model, task.x, task.y, callbacks=[callbacks.TerminateOnNaN()])
    return {"history": history, "iterations": to_numpy(model.optimizer.iterations)}


@CALLBACKS.case("`ModelCheckpoint`: each file once, loads as a plain model")
def checkpoint(adopt: Adopt) -> Results:
    with temporary_folder("unisono-case-") as folder:
        save = callbacks.ModelCheckpoint(f"{folder}/{{epoch}}.keras")
        weights = callbacks.ModelCheckpoint(
            f"{folder}/best.weights.h5", save_weights_only=True, save_best_only=True
        )
        results = fit_with(compiled(adopt), save, weights, epochs=2)
        loaded = keras.models.load_model(f"{folder}/2.keras")
        again = exercise(loaded, epochs=1)
        return {"results": results, "files": files_in(folder), "again": again}


class Interrupted(Exception):
    """Ends a fit in its middle."""


@CALLBACKS.case("`BackupAndRestore` after an interruption")
def backup(adopt: Adopt) -> Results:
    def interrupt(epoch: int, logs: Any) -> None:
        if epoch == 2:
            raise Interrupted

    task = regression()
    with temporary_folder("unisono-case-") as folder:
        model = compiled(adopt, optimizers.Adam(0.01))
        watchers = [
            callbacks.BackupAndRestore(folder),
            callbacks.LambdaCallback(on_epoch_begin=interrupt),
        ]
        with contextlib.suppress(Interrupted):
            fit(model, task.x, task.y, callbacks=watchers)
        resumed = compiled(adopt, optimizers.Adam(0.01))
        watchers = [callbacks.BackupAndRestore(folder)]
        history = fit(resumed, task.x, task.y, callbacks=watchers)
        return {"history": history, **state_of(resumed)}


@CALLBACKS.case("`CSVLogger`")
def csv_logger(adopt: Adopt) -> Results:
    with temporary_folder("unisono-case-") as folder:
        path = Path(folder, "log.csv")
        results = fit_with(compiled(adopt), callbacks.CSVLogger(path))
        with path.open() as file:
            lines = [{k: float(v) for k, v in line.items()} for line in csv.DictReader(file)]
        return {"results": results, "lines": lines}


@CALLBACKS.case("`SwapEMAWeights`")
def swap_ema(adopt: Adopt) -> Results:
    optimizer = optimizers.SGD(0.05, use_ema=True, ema_momentum=0.8)
    return fit_with(compiled(adopt, optimizer), callbacks.SwapEMAWeights(swap_on_epoch=True))
