"""Telemetry of a `fit` for `unisono top`: counted at each step, written by a thread.

A step costs two clock readings. Another thread waits for a loss that the device has not computed
yet, so that records go on while a step waits for a process that is held up.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from unisono.devices import Placement
from unisono.devices.cpu import CoreMeter
from unisono.launch.client import current_world
from unisono.log import logger
from unisono.monitor.events import EventFile, Progress, Writer, read_ranks, run_name, ticks_of
from unisono.monitor.verdict import remark_on_load

_EVERY_S = 1.0
# After so many times the duration of the last steps, training counts as stalled.
_LATE_STEPS = 3.0
# A remark is made about what lasts; the first steps are compiled.
_LASTING_S = 5
# How long a record waits for a loss that the device still computes.
_LOSS_S = 0.1


class Telemetry:
    """Counts the steps of one model's training; see fit.StepObserver."""

    def __init__(self, folder: Path, global_batch: int | None, placement: Placement) -> None:
        self._folder = folder
        self._global_batch = global_batch
        self._placement = placement
        self._num_steps = 0
        self._waited_s = 0.0
        self._logs: Any = None
        self._loss = Loss()
        self._failed_with: str | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, model: Any) -> None:
        self._model = model
        self._last_end = time.perf_counter()
        self._steps_at_once = getattr(model, "steps_per_execution", 1)
        self._thread = threading.Thread(target=self._record, name="unisono-events", daemon=True)
        self._thread.start()

    def before(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        *rest, data = args
        if isinstance(data, list):
            # Batches, which Keras on torch has fetched since the last step.
            self._waited_s += time.perf_counter() - self._last_end
        return (*rest, self._timed(data)) if is_plain_iterator(data) else args

    def after(self, result: Any) -> None:
        self._num_steps += self._steps_at_once
        # On JAX a step returns its logs and the new state.
        self._logs = result[0] if isinstance(result, tuple) else result
        self._last_end = time.perf_counter()

    def end(self, error: BaseException | None) -> None:
        self._failed_with = type(error).__name__ if error is not None else None
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(0.2)  # At most a short delay of the program.

    def _timed(self, iterator: Any) -> Iterator[Any]:
        while True:
            start = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._waited_s += time.perf_counter() - start
            yield batch

    def _record(self) -> None:
        writer = self.writer()
        file = EventFile(self._folder, writer)
        world = current_world()
        cores = CoreMeter()
        remarks = Remarks(self._folder, writer) if writer.rank == 0 else None
        pace = Pace(self._last_end)
        waited_s, at = self._waited_s, time.perf_counter()
        peers_s = world.waited_s if world is not None else 0.0
        is_over = False
        while file.is_open and not is_over:
            is_over = self._is_over.wait(_EVERY_S)
            now = time.perf_counter()
            past_s = max(now - at, 1e-9)
            rate = pace.steps_per_s(self._num_steps, self._last_end, now)
            wait = min(1.0, (self._waited_s - waited_s) / past_s) if self._waited_s else None
            use = cores.read()
            peers = None
            if world is not None:
                peers = min(1.0, (world.waited_s - peers_s) / past_s)
                if self._placement.kind == "cpu":
                    peers = max(peers, 1.0 - use.used - use.waited - (wait or 0.0))
            file.write(self.progress(rate, wait, peers, use.wait, is_over))
            if remarks is not None and not is_over:
                remarks.look()
            waited_s, at = self._waited_s, now
            peers_s = world.waited_s if world is not None else 0.0
        file.close()

    def progress(
        self,
        rate: float,
        wait: float | None,
        peers: float | None,
        core_wait: float | None,
        is_over: bool,
    ) -> Progress:
        """The present state of training."""
        params = _params(self._model)
        num_steps = params.get("steps")
        # The last step of an epoch belongs to it, and not to the next.
        epoch = max(self._num_steps - 1, 0) // num_steps if num_steps else 0
        return Progress(
            at=time.time(),
            epoch=epoch + 1,
            num_epochs=params.get("epochs"),
            step=self._num_steps - epoch * num_steps if num_steps else self._num_steps,
            num_steps=num_steps,
            samples_per_s=rate * self._global_batch if self._global_batch else None,
            steps_per_s=rate,
            input_wait=wait,
            loss=self._loss.newest(self._logs),
            peer_wait=peers,
            core_wait=core_wait,
            is_over=is_over,
            failed_with=self._failed_with,
        )

    def writer(self) -> Writer:
        """This process, as `unisono top` shows it."""
        world = current_world()
        host, pid = socket.gethostname(), os.getpid()
        return Writer(
            run=run_name(None if world is None else world.seed),
            host=host,
            pid=pid,
            started=ticks_of(pid),
            rank=0 if world is None else world.rank,
            world_size=1 if world is None else world.size,
            num_replicas=self._placement.num_replicas if world is None else 1,
            devices=str(self._placement),
            backend=keras.backend.backend(),
            program=" ".join(sys.argv)[:200],
            began=time.time(),
        )


class Remarks:
    """Logs once, in the chief, that cores are short or communication dominates."""

    def __init__(self, folder: Path, writer: Writer) -> None:
        self._folder = folder
        self._writer = writer
        self._num_seconds = 0

    def look(self) -> None:
        """Read what the processes of this node have last written."""
        if self._num_seconds >= _LASTING_S:
            return
        said = remark_on_load(read_ranks(self._folder, self._writer.run))
        self._num_seconds = self._num_seconds + 1 if said else 0
        if self._num_seconds == _LASTING_S:
            logger.warning(f"{said}. `unisono top` shows more.")


class Pace:
    """Steps per second from the times at which steps ended, as a step may take seconds."""

    def __init__(self, begun: float) -> None:
        self._num_steps = 0
        self._end = begun
        self._rate = 0.0

    def steps_per_s(self, num_steps: int, last_end: float, now: float) -> float:
        """The rate of the steps since the last call; the rate before while one is in flight."""
        if num_steps > self._num_steps and last_end > self._end:
            self._rate = (num_steps - self._num_steps) / (last_end - self._end)
            self._num_steps, self._end = num_steps, last_end
        elif (now - self._end) * self._rate > _LATE_STEPS:
            self._rate = 0.0
        return self._rate


class Loss:
    """Reads losses in a thread: where a step waits for a lost process, its loss never comes."""

    def __init__(self) -> None:
        self._value: float | None = None
        self._reading: threading.Thread | None = None

    def newest(self, logs: Any) -> float | None:
        """The loss of these logs; an earlier one while the device has not computed it."""
        if self._reading is None or not self._reading.is_alive():
            thread = threading.Thread(
                target=self._read, args=(logs,), name="unisono-loss", daemon=True
            )
            with contextlib.suppress(RuntimeError):  # No more threads here, or Python ends.
                thread.start()
                self._reading = thread
        if self._reading is not None:
            self._reading.join(_LOSS_S)
        return self._value

    def _read(self, logs: Any) -> None:
        self._value = _loss(logs)


def is_plain_iterator(data: Any) -> bool:
    """Whether something is an iterator of Python's: TensorFlow's are traced into its functions."""
    is_traced = type(data).__module__.partition(".")[0] == "tensorflow"
    return isinstance(data, Iterator) and not is_traced


def _params(model: Any) -> dict[str, Any]:
    history = getattr(model, "history", None)
    return getattr(history, "params", None) or {}


def _loss(logs: Any) -> float | None:
    try:
        value = logs["loss"]
        return float(np.asarray(keras.ops.convert_to_numpy(value)))
    except Exception:  # Donated to the next step, or no loss at all.
        return None
