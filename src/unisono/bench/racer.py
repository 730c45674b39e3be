"""One process of a benchmark: it trains a net a pass at a time, when a file appears.

    python -m unisono.bench.racer FOLDER WAY NET NUM_STEPS NUM_REPLICAS

It writes FOLDER/WAY-ready-RANK after a warm-up, and FOLDER/WAY-N-RANK with the measurements of the
Nth pass as JSON. A pass starts when FOLDER/WAY-N appears; the process ends when FOLDER/end does.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.bench.nets import PER_REPLICA, PIECES, data, make

_POLL_S = 0.02

Pass = Callable[[], float]
"""Trains one pass; returns the time at which it ended, by time.perf_counter."""


def main(folder: Path, way: str, net: str, num_steps: int, num_replicas: int) -> None:
    import unisono

    rank = int(os.environ.get("BENCH_RANK", unisono.topology().rank))
    kind = way.rpartition("-")[0].partition(":")[0]
    one_pass = (_WAYS.get(kind) or _peer(kind))(net, num_steps, num_replicas)
    one_pass()
    one_pass()
    (folder / f"{way}-ready-{rank}").touch()
    for number in range(1_000_000):
        if not _wait_for(folder / f"{way}-{number}", folder / "end"):
            return
        start, cpu = time.perf_counter(), time.process_time()
        ended = one_pass()
        measured = {
            "seconds": ended - start,
            "cpu_s": time.process_time() - cpu,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            **(one_pass.waits() if isinstance(one_pass, _TimedPass) else {}),
        }
        part = folder / f"{way}-{number}-{rank}.part"
        part.write_text(json.dumps(measured))
        part.rename(part.with_suffix(""))


def fit_pass(
    model: Any, net: str, num_rows: int, global_batch: int, *, rows: slice = slice(None)
) -> Pass:
    """Passes of `fit` over random arrays.

    A pass of a short net is an epoch as long as one of the real data. One of a long net is a few
    steps, and on TensorFlow ends with its last step: there the end of an epoch may wait for
    tf.data's tuning thread for as long as the epoch took, which is little of an epoch of minutes
    and much of a few steps.
    """
    import keras

    x, y = (array[rows] for array in data(net, num_rows))
    is_piece = net in PIECES and keras.backend.backend() == "tensorflow"
    last_step = _last_step() if is_piece else None

    def fit() -> float:
        callbacks = [last_step] if last_step is not None else None
        model.fit(x, y, batch_size=global_batch, verbose=0, callbacks=callbacks)
        return float(last_step.ended if last_step is not None else time.perf_counter())

    return fit


def loop_pass(step: Callable[[], Any], num_steps: int) -> Pass:
    """Passes of a custom training loop; ends when the last step's result is computed."""

    def loop() -> float:
        result = None
        for _ in range(num_steps):
            result = step()
        if result is not None:
            float(result)
        return time.perf_counter()

    return loop


def _last_step() -> Any:
    import keras

    class LastStep(keras.callbacks.Callback):
        """Records when the last step of an epoch has ended."""

        ended = 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch + 1 == self.params["steps"]:
                for value in (logs or {}).values():
                    float(value)  # Waits until it is computed.
                self.ended = time.perf_counter()

    return LastStep()


def _wait_for(file: Path, end: Path) -> bool:
    """Whether `file` has appeared, rather than `end`."""
    while not file.exists():
        if end.exists():
            return False
        time.sleep(_POLL_S)
    return True


def _peer(kind: str) -> Callable[[str, int, int], Pass]:
    from unisono.bench.peers import PEERS

    return PEERS[kind].start


def _plain(net: str, num_steps: int, num_replicas: int) -> Pass:
    """Plain Keras on the global batch."""
    return _fit_of(make(net), net, num_steps, num_replicas)


def _one(net: str, num_steps: int, num_replicas: int) -> Pass:
    """unisono.parallel with one replica, on the global batch."""
    import unisono

    return _fit_of(unisono.parallel(make(net), replicas=1), net, num_steps, num_replicas)


def _inside(net: str, num_steps: int, num_replicas: int) -> Pass:
    """unisono.parallel in one process."""
    import unisono

    model = unisono.parallel(make(net), replicas=num_replicas)
    return _fit_of(model, net, num_steps, num_replicas)


def _together(net: str, num_steps: int, num_replicas: int) -> Pass:
    """unisono.parallel in each of several processes."""
    import unisono

    model = unisono.parallel(make(net))
    return _TimedPass(model, _fit_of(model, net, num_steps, num_replicas))


_WAYS = {
    "plain": _plain,
    "apart": _plain,
    "one": _one,
    "inside": _inside,
    "together": _together,
}


class _TimedPass:
    """A pass that also measures how long it waited for other processes and for input."""

    def __init__(self, model: Any, fit: Pass) -> None:
        from unisono.launch.client import current_world

        self._model = model
        self._fit = fit
        self._world = current_world()
        self._waited_s = 0.0

    def __call__(self) -> float:
        before = self._total_wait_s()
        ended = self._fit()
        self._waited_s = self._total_wait_s() - before
        return ended

    def waits(self) -> dict[str, float]:
        return {"waited_s": self._waited_s, "input_s": self._input_s()}

    def _total_wait_s(self) -> float:
        return 0.0 if self._world is None else self._world.waited_s

    def _input_s(self) -> float:
        """How long the batches of a pass take when no step is computed."""
        plain, ends = self._model.train_function, []

        def take(*args: Any) -> Any:
            *state, batches = args
            if not isinstance(batches, list):  # On torch Keras has fetched them already.
                next(batches)
            ends.append(time.perf_counter())
            return ({}, *state) if state else {}

        self._model.train_function = take
        try:
            self._fit()
        finally:
            self._model.train_function = plain
        return (ends[-1] - ends[0]) * len(ends) / max(1, len(ends) - 1)


def _fit_of(model: Any, net: str, num_steps: int, num_replicas: int) -> Pass:
    batch = PER_REPLICA[net] * num_replicas
    return fit_pass(model, net, batch * num_steps, batch)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
