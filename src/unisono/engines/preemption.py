"""Training that makes room when it is warned: callbacks are told, and the program ends.

All processes of a run stop before the same step, with the weights of the one before. A callback
may have a method `on_preempt(logs)`, in which to save what it needs.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from unisono.errors import Preempted
from unisono.launch.warning import REQUEUE, heeding, is_warned
from unisono.launch.world import current_world

_PLACE = 5  # Of `callbacks` among the arguments of `fit`.


def making_room(fit: Callable[..., Any]) -> Callable[..., Any]:
    """A `fit` that looks for a warning before each step."""

    def fit_with_an_eye_on_warnings(*args: Any, **kwargs: Any) -> Any:
        is_by_place = len(args) > _PLACE
        given = args[_PLACE] if is_by_place else kwargs.get("callbacks")
        if isinstance(given, keras.callbacks.CallbackList):
            return fit(*args, **kwargs)
        callbacks = keras.tree.flatten(given) if given else []
        callbacks = [*callbacks, MakeRoom(callbacks)]
        if is_by_place:
            args = (*args[:_PLACE], callbacks, *args[_PLACE + 1 :])
        else:
            kwargs["callbacks"] = callbacks
        with heeding():
            return fit(*args, **kwargs)

    return fit_with_an_eye_on_warnings


class MakeRoom(keras.callbacks.Callback):
    """Wraps Keras' train function: a callback at each batch would keep Keras from running ahead."""

    def __init__(self, callbacks: list[Any]) -> None:
        super().__init__()
        self._told = [callback for callback in callbacks if hasattr(callback, "on_preempt")]
        self._is_said = False

    def on_train_begin(self, logs: Any = None) -> None:
        plain = self.model.train_function

        def train_function(*args: Any) -> Any:
            if _must_leave():
                self._leave()
            return plain(*args)

        self._plain = plain
        self.model.train_function = train_function

    def on_train_end(self, logs: Any = None) -> None:
        self.model.train_function = self._plain

    def _leave(self) -> None:
        world = current_world()
        if not self._told and not os.environ.get(REQUEUE):
            if not self._is_said and (world is None or world.is_chief):
                print(
                    "\nunisono: this run is about to be ended. No callback has a method "
                    "on_preempt(logs), and nothing starts it again, so it goes on while it can.",
                    file=sys.stderr,
                    flush=True,
                )
            self._is_said = True
            return
        self.model.train_function = self._plain
        found = self.model.get_metrics_result()
        logs = {name: np.asarray(keras.ops.convert_to_numpy(v)).item() for name, v in found.items()}
        for callback in self._told:
            callback.on_preempt(logs)
        if world is None or world.is_chief:
            print("\nunisono: training has made room.", file=sys.stderr, flush=True)
        raise Preempted


def _must_leave() -> bool:
    world = current_world()
    return is_warned() if world is None else world.is_warned
