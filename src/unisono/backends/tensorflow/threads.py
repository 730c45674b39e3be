"""Python-side state of replicas that tf.distribute runs as threads of one process.

One thread runs at a time, and hands over wherever replicas meet (`merge_call`), in the middle of a
forward pass too. Each replica must find there what it left: attributes of the model's objects, such
as the losses that layers have added, are kept apart for each replica. Keras' global state belongs
to a thread, so replicas start with that of the thread that runs the step.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.utils.tracking import TrackedDict, TrackedList, TrackedSet

from unisono.backends.tensorflow.seeds import StepSeeds

_BASES: dict[type, type] = {
    list: list,
    TrackedList: list,
    dict: dict,
    TrackedDict: dict,
    set: set,
    TrackedSet: set,
    deque: deque,
}
"""Containers whose contents are kept, each with a class whose methods no tracker intercepts."""


class ReplicaThreads:
    """The threads of one step; made in the thread that runs it.

    `objects` are the layers, metrics and others whose attributes are kept apart.
    """

    def __init__(self, strategy: tf.distribute.Strategy, objects: Iterable[Any]) -> None:
        self._objects = list(objects)
        self._seeds = StepSeeds(strategy)
        self._before = Attributes(self._objects)
        self._after_first: Attributes | None = None
        trackers = (global_state.GLOBAL_STATE_TRACKER, global_state.GLOBAL_SETTINGS_TRACKER)
        self._keras_state = [(tracker, dict(vars(tracker))) for tracker in trackers]

    @contextmanager
    def replica(self) -> Iterator[None]:
        """What is done inside is done by the thread of one replica."""
        context: Any = tf.distribute.get_replica_context()
        hand_over = context._merge_call

        def merge_call(*args: Any) -> Any:
            own = Attributes(self._objects)
            result = hand_over(*args)
            own.restore()
            return result

        for tracker, of_caller in self._keras_state:
            vars(tracker).update(of_caller)
        self._before.restore()
        context._merge_call = merge_call
        with self._seeds.used():
            yield
        if self._after_first is None:
            self._after_first = Attributes(self._objects)

    def finish(self) -> None:
        """Leave what the first replica left, as one device would."""
        self._seeds.finish()
        if self._after_first is not None:
            self._after_first.restore()


class Attributes:
    """The attributes of some objects as they are now, with the contents of lists, dicts and sets.

    Written past the trackers of Keras and TensorFlow, which intercept assignments.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self._attributes = [(vars(o), dict(vars(o))) for o in objects]
        containers = {
            id(value): value
            for _, kept in self._attributes
            for value in kept.values()
            if type(value) in _BASES
        }
        self._contents = [(value, _BASES[type(value)](value)) for value in containers.values()]

    def restore(self) -> None:
        for attributes, kept in self._attributes:
            for name in [name for name in attributes if name not in kept]:
                del attributes[name]
            for name, value in kept.items():
                if attributes.get(name) is not value:
                    attributes[name] = value
        for container, kept in self._contents:
            _refill(container, kept)


def _refill(container: Any, kept: Any) -> None:
    base: Any = _BASES[type(container)]
    if base is set:
        is_same = set.__eq__(container, kept)
    else:
        pairs = zip(container, kept, strict=False)
        is_same = len(container) == len(kept) and all(a is b for a, b in pairs)
        if base is dict:
            is_same = is_same and all(container[key] is value for key, value in kept.items())
    if is_same:
        return
    base.clear(container)
    (base.update if base in (dict, set) else base.extend)(container, kept)
