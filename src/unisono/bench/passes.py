"""One pass of training: of `fit` over arrays, as all ways that have Keras train it, or of a loop.

A pass of a short net is an epoch as long as one of the real data, with all that ends an epoch. One
of a long net is a piece of an epoch, and on TensorFlow ends with its last step: the end of an epoch
waits for tf.data's tuning thread for as long as the epoch took, up to a minute. Of an epoch of
minutes that is a small share, and of a few steps a large one.
"""

import time
from collections.abc import Callable
from typing import Any

from unisono.bench.nets import PIECES, data

Pass = Callable[[], float]
"""Trains one pass; the time at which it had ended, by time.perf_counter."""


def fit_pass(
    model: Any, net: str, num_rows: int, global_batch: int, *, rows: slice = slice(None)
) -> Pass:
    """Passes of a compiled model over those rows of so many."""
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
    """Passes of somebody's own step."""

    def loop() -> float:
        for _ in range(num_steps):
            step()
        return time.perf_counter()

    return loop


def _last_step() -> Any:
    import keras

    class LastStep(keras.callbacks.Callback):
        """Notes when the last step of an epoch has ended."""

        ended = 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch + 1 == self.params["steps"]:
                for value in (logs or {}).values():
                    float(value)  # It is computed then.
                self.ended = time.perf_counter()

    return LastStep()
