"""The callback of a training: shows progress, keeps the history, and writes the results.

Every process has one, since all must stop together; only the chief prints and writes. It has no
`on_train_batch_end`, which would make Keras wait for the device after each step.
"""

import csv
import dataclasses
import importlib.metadata
import io
import json
import math
import platform
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from unisono.devices import list_devices
from unisono.devices.cpu import cpu_name
from unisono.errors import OutputError, Preempted
from unisono.imports import keras_backend
from unisono.launch.client import current_world
from unisono.launch.preemption_signal import request_preemption
from unisono.parallel import check_replicas
from unisono.training.results import clock, draw, epoch_line, speed, summary
from unisono.training.settings import write

if TYPE_CHECKING:
    from unisono.training.run import Run

INTERRUPTED = 128 + signal.SIGINT


class Bar:
    """The progress of one pass over the data in one line, redrawn in place."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._is_drawn = False
        self._last_drawn_s = 0.0

    def begin(self, title: str, num_steps: int | None, num_samples: int | None) -> None:
        self._title = title
        self._num_steps = num_steps
        self._num_samples = num_samples
        self._begin_s = time.perf_counter()

    def update(self, num_done: int, logs: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        if now - self._last_drawn_s < _PAUSE_S:
            return
        self._last_drawn_s = now
        spent_s = now - self._begin_s
        parts = [self._title, *self._shares(num_done, spent_s)]
        parts += [f"{name} {float(value):.4f}" for name, value in logs.items()]
        columns = shutil.get_terminal_size().columns - 1
        sys.stdout.write("\r\x1b[K" + "  ".join(parts)[:columns])
        sys.stdout.flush()
        self._is_drawn = True

    def clear(self) -> None:
        if self._is_drawn:
            sys.stdout.write("\r\x1b[K")
            sys.stdout.flush()
            self._is_drawn = False

    def _shares(self, num_done: int, spent_s: float) -> list[str]:
        if not self._num_steps:
            return [f"{num_done} steps"]
        share = min(1.0, num_done / self._num_steps)
        full = round(share * _WIDTH)
        parts = [f"[{'=' * full}{'.' * (_WIDTH - full)}] {num_done}/{self._num_steps}"]
        if self._num_samples:
            parts.append(speed(share * self._num_samples / spent_s, self._num_replicas))
        parts.append(f"{clock(spent_s / share - spent_s)} left")
        return parts


class _Interrupted(Exception):
    """Ctrl-C was pressed: skip evaluation."""


class Recorder(keras.callbacks.Callback):
    """Give it to `fit` inside `with run.recording(...)`."""

    def __init__(self, run: "Run", model: Any, num_samples: int) -> None:
        super().__init__()
        self.record = describe_run(run, num_samples)
        self._run = run
        self._trained = model
        self._num_samples = num_samples
        self._bar = Bar(run.num_replicas)
        self._is_interrupted = False
        self._handler: Any = None
        self._begin_s = time.perf_counter()
        self._test_begin_s: float | None = None

    def __enter__(self) -> "Recorder":
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGINT, self._interrupt)
        if self._run.is_chief:
            print(self._run.describe(), flush=True)
        self._begin_s = time.perf_counter()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        self._bar.clear()
        if kind not in (None, _Interrupted, KeyboardInterrupt, Preempted):
            return False
        self.record["total_s"] = time.perf_counter() - self._begin_s
        self.record["is_interrupted"] = self._is_interrupted or kind is not None
        try:
            self._finish()
        except OutputError as failure:
            self._run.fail(failure)
        if kind is Preempted:
            return False
        if self.record["is_interrupted"]:
            sys.exit(INTERRUPTED)
        return True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch_begin_s = time.perf_counter()
        self._test_begin_s = None
        title = f"epoch {epoch + 1}/{self._run.num_epochs}"
        self._bar.begin(title, self.params.get("steps"), self._num_samples)
        if self._is_interrupted:
            self.model.stop_training = True

    def on_test_begin(self, logs: Any = None) -> None:
        self._wait_for_steps()
        self._test_begin_s = time.perf_counter()
        if self.model.stop_training:
            raise _Interrupted

    def on_preempt(self, logs: Any) -> None:
        """Called in all processes before the same step; the results so far are then written."""
        if self._is_interrupted:
            raise _Interrupted

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._wait_for_steps()
        now = time.perf_counter()
        train_s = (self._test_begin_s or now) - self._epoch_begin_s
        row = {
            "epoch": epoch + 1,
            "epoch_s": now - self._epoch_begin_s,
            "train_s": train_s,
            "samples_per_s": self._num_samples / train_s,
            "learning_rate": _learning_rate(self.model),
            **{name: float(logs[name]) for name in sorted(logs or {}, key=_place)},
        }
        self.record["history"].append(row)
        self._bar.clear()
        if self._run.is_chief:
            print(epoch_line(row, self._run), flush=True)
            self._write_history(is_last=False)
        if self._is_interrupted:
            self.model.stop_training = True

    def _wait_for_steps(self) -> None:
        """Wait for the steps in flight: their time does not belong to the test."""
        keras.ops.convert_to_numpy(self.model.optimizer.iterations)

    def _interrupt(self, number: int, frame: Any) -> None:
        if self._is_interrupted:
            raise KeyboardInterrupt
        self._is_interrupted = True
        if self._run.is_chief:
            self._bar.clear()
            print("Ctrl-C: this step is the last; press it again to end at once.", flush=True)
        if current_world() is None:
            self._trained.stop_training = True
        else:
            request_preemption()  # All processes stop at the same step.

    def _finish(self) -> None:
        """Write all files; an error in one does not prevent the others."""
        self.record["checksum"] = self._checksum()
        if not self._run.is_chief:
            return
        outputs = self._run.settings.outputs
        failures = [
            self._try(outputs.model, lambda path: plain_copy(self._trained).save(path)),
            *self._write_history(is_last=True),
        ]
        if self.record["history"]:
            failures.append(self._draw(outputs.plot))
            print(f"\n{summary(self.record)}\n", flush=True)
        print(f"results: {outputs.folder}", flush=True)
        for failure in failures:
            if failure is not None:
                raise failure

    def _checksum(self) -> str | None:
        is_replicated = self.record["history"] and not self.record["is_interrupted"]
        if self._run.num_replicas == 1 or not is_replicated:
            return None
        return str(check_replicas(self._trained))

    def _write_history(self, *, is_last: bool) -> list[OutputError | None]:
        outputs = self._run.settings.outputs
        found = [
            self._try(outputs.table, lambda path: _write_csv(path, self.record["history"])),
            self._try(outputs.record, lambda path: to_json(self.record, path)),
        ]
        if not is_last:
            for failure in filter(None, found):
                print(f"warning: {failure}", file=sys.stderr, flush=True)
        return found

    def _draw(self, path: Path) -> OutputError | None:
        return self._try(path, lambda draft: draw([self.record], draft))

    def _try(self, path: Path, fill: Any) -> OutputError | None:
        try:
            write(path, fill)
        except OutputError as error:
            return error
        return None


class ShownRecorder(Recorder):
    """Draws a progress bar on a terminal."""

    def __init__(self, run: "Run", model: Any, num_samples: int) -> None:
        super().__init__(run, model, num_samples)
        self.steps = _Steps(self._bar)
        self._num_tested = 0
        self._num_test_steps: int | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self.steps.num_done = 0

    def on_test_begin(self, logs: Any = None) -> None:
        super().on_test_begin(logs)
        self._bar.begin("test", self._num_test_steps, None)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._num_tested = batch + 1
        self._bar.update(batch + 1, logs or {})

    def on_test_end(self, logs: Any = None) -> None:
        # Keras does not say how many steps a test has, but it is the same number each time.
        self._num_test_steps = self._num_tested


class _Steps:
    """Counts the steps of an epoch for the progress bar."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._steps_at_once = 1
        self.num_done = 0

    def begin(self, model: Any) -> None:
        self._steps_at_once = getattr(model, "steps_per_execution", 1)

    def before(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args

    def after(self, result: Any) -> None:
        self.num_done += self._steps_at_once
        # On JAX a step returns its logs and the new state.
        self._bar.update(self.num_done, result[0] if isinstance(result, tuple) else result)

    def end(self, error: BaseException | None) -> None:
        pass


def _place(name: str) -> tuple[bool, bool]:
    """Sort key: train before test, the loss first."""
    return name.startswith("val_"), not name.endswith("loss")


def plain_copy(model: Any) -> Any:
    """A copy that loads without unisono: its optimizer has a number as learning rate."""
    try:
        copy = keras.models.clone_model(model)
    except (ValueError, TypeError, NotImplementedError):
        return model  # A subclassed model, which cannot be cloned.
    copy.set_weights(model.get_weights())
    if model.compiled:
        config = model.get_compile_config()
        if isinstance(config["optimizer"], dict):  # Not just its name.
            config["optimizer"]["config"]["learning_rate"] = _learning_rate(model)
        copy.compile_from_config(config)
    return copy


def _learning_rate(model: Any) -> float:
    return float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


def _write_csv(path: Path, history: list[dict[str, Any]]) -> None:
    text = io.StringIO()
    if history:
        writer = csv.DictWriter(text, list(history[0]), lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(history)
    path.write_text(text.getvalue())


if TYPE_CHECKING:
    from unisono.training.run import Run

_PACKAGES = ("unisono", "keras", "jax", "tensorflow", "torch", "numpy")


def describe_run(run: "Run", num_samples: int) -> dict[str, Any]:
    """What is known before the first epoch: settings, versions, devices."""
    return {
        "recipe": run.settings.recipe,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "backend": keras_backend(),
        "num_replicas": run.num_replicas,
        "global_batch": run.global_batch,
        "num_samples": num_samples,
        "learning_rate": run.describe(),
        "settings": dataclasses.asdict(run.settings),
        "versions": {"python": platform.python_version(), **_versions()},
        "devices": [dataclasses.asdict(device) for device in list_devices().devices],
        "cpu": cpu_name(),
        "num_processes": run.num_processes,
        "history": [],
    }


def to_json(record: dict[str, Any], path: Path) -> None:
    text = json.dumps(_plain(record), indent=2, default=str, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity: None instead."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


_WIDTH = 20
_PAUSE_S = 0.1
