"""Training that stops when it is preempted: callbacks save, and the program ends.

All processes of a run stop before the same step, with the weights of the one before. A callback
may have a method `on_preempt(logs)`, in which to save what it needs.
"""

import os
from typing import Any

import keras
import numpy as np

from unisono.errors import Preempted
from unisono.launch.client import current_world
from unisono.launch.preemption_signal import REQUEUE, is_preempting, watch
from unisono.log import logger


class Preemption:
    """Checks before each step whether the run is being preempted; see fit.StepObserver."""

    def __init__(self, callbacks: list[Any]) -> None:
        self._callbacks = [callback for callback in callbacks if hasattr(callback, "on_preempt")]
        self._has_warned = False
        self._model: Any = None
        self._plain: Any = None

    def begin(self, model: Any) -> None:
        self._model = model
        self._plain = model.train_function
        watch(True)

    def before(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        world = current_world()
        if is_preempting() if world is None else world.is_preempting:
            self._stop()
        return args

    def after(self, result: Any) -> None:
        pass

    def end(self, error: BaseException | None) -> None:
        if self._model is not None:
            watch(False)
        self._model = None

    def _stop(self) -> None:
        world = current_world()
        is_chief = world is None or world.is_chief
        if not self._callbacks and not os.environ.get(REQUEUE):
            if not self._has_warned and is_chief:
                logger.warning(
                    "this run is about to be ended. No callback has a method on_preempt(logs), and "
                    "nothing starts it again, so it goes on while it can."
                )
            self._has_warned = True
            return
        self._model.train_function = self._plain
        found = self._model.get_metrics_result()
        logs = {name: np.asarray(keras.ops.convert_to_numpy(v)).item() for name, v in found.items()}
        for callback in self._callbacks:
            callback.on_preempt(logs)
        if is_chief:
            logger.warning("training was preempted; callbacks have saved.")
        raise Preempted
