"""The callback of a training: shows how it goes, keeps its history, and writes its results.

Every process has one, since all of them must stop together; the chief's alone shows and writes. It
has no method for a batch's end, which would keep Keras from running ahead of the device.
"""

import csv
import io
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from unisono.errors import OutputError, Preempted
from unisono.launch.client import current_world
from unisono.launch.preemption_signal import request_preemption
from unisono.parallel import check_replicas
from unisono.training import plot, tables
from unisono.training.outputs import write
from unisono.training.progress import Bar
from unisono.training.record import describe_run, to_json

if TYPE_CHECKING:
    from unisono.training.run import Run

INTERRUPTED = 128 + signal.SIGINT


class _Interrupted(Exception):
    """Ctrl-C was pressed: nothing is to be evaluated any more."""


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
        """Called in all processes before the same step; what there is is then written."""
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
            print(tables.epoch_line(row, self._run), flush=True)
            self._write_history(is_last=False)
        if self._is_interrupted:
            self.model.stop_training = True

    def _wait_for_steps(self) -> None:
        """Let the device end the steps that Keras has given it: they are not part of the test."""
        keras.ops.convert_to_numpy(self.model.optimizer.iterations)

    def _interrupt(self, number: int, frame: Any) -> None:
        if self._is_interrupted:
            raise KeyboardInterrupt
        self._is_interrupted = True
        if self._run.is_chief:
            self._bar.clear()
            print("Ctrl-C: this step is the last; a second one ends at once.", flush=True)
        if current_world() is None:
            self._trained.stop_training = True
        else:
            request_preemption()  # All processes see it at the same step.

    def _finish(self) -> None:
        """Write all there is; one file that cannot be written does not keep the others."""
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
            print(f"\n{tables.summary(self.record)}\n", flush=True)
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
        return self._try(path, lambda draft: plot.draw([self.record], draft))

    def _try(self, path: Path, fill: Any) -> OutputError | None:
        try:
            write(path, fill)
        except OutputError as error:
            return error
        return None


class ShownRecorder(Recorder):
    """Draws its bar on a terminal."""

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
        # Keras does not tell how many there will be, but it is the same number each time.
        self._num_test_steps = self._num_tested


class _Steps:
    """Counts the steps of an epoch for its bar."""

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
    """Train before test, and the loss first, on every backend."""
    return name.startswith("val_"), not name.endswith("loss")


def plain_copy(model: Any) -> Any:
    """The model as any Keras loads it: no schedule of ours in the optimizer's settings."""
    try:
        copy = keras.models.clone_model(model)
    except (ValueError, TypeError, NotImplementedError):
        return model  # Of a class of the user's own, which cannot be built anew from its layers.
    copy.set_weights(model.get_weights())
    if model.compiled:
        config = model.get_compile_config()
        if isinstance(config["optimizer"], dict):  # And not just the name of one.
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
