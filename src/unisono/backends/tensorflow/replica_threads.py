"""Python-side state of the replicas that tf.distribute runs as threads of this process.

One thread runs at a time, and switches at every `merge_call`, also in the middle of a forward pass.
What the code of a step keeps in Python (the losses that layers have added, a cached tensor, a
counter) would be read and written by all replicas, so each gets its own. After the step it is that
of the first replica, which has the first rows.
"""

import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.utils.tracking import TrackedDict, TrackedList, TrackedSet

from unisono.backends.tensorflow.variables import COPIES, StepSeeds

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
_LONGEST = 1000
"""Items of a container that is searched for more state: not those of a vocabulary."""


_KERAS_STATES = ("GLOBAL_STATE_TRACKER", "GLOBAL_SETTINGS_TRACKER")
"""What Keras keeps by thread; the second until 3.15."""


class ReplicaThreads:
    """The threads of one step; made in the thread that runs it.

    `objects` (layers, metrics and others) are those whose attributes are kept apart. Keras' global
    state belongs to a thread, so replicas start with that of the thread that runs the step.
    """

    def __init__(self, strategy: tf.distribute.Strategy, objects: Iterable[Any]) -> None:
        self._objects, self._containers = _holders_of_state(objects)
        self._seeds = StepSeeds(strategy)
        self._variables = _BareVariables(self._objects, strategy.extended.worker_devices[1:])
        self._before = self._state()
        self._num_started = 0
        self._after_first: _Attributes | None = None
        found = (getattr(global_state, name, None) for name in _KERAS_STATES)
        self._keras_state = [(state, dict(vars(state))) for state in found if state is not None]

    @contextmanager
    def replica(self) -> Iterator[None]:
        """Run what is inside as the thread of one replica."""
        context: Any = tf.distribute.get_replica_context()
        switch = context._merge_call

        def merge_call(*args: Any) -> Any:
            own = self._state()
            result = switch(*args)
            own.restore()
            return result

        for tracker, of_caller in self._keras_state:
            vars(tracker).update(of_caller)
        self._before.restore()
        self._variables.use(self._num_started)
        self._num_started += 1
        context._merge_call = merge_call
        with self._seeds.used():
            yield
        if self._after_first is None:
            self._after_first = self._state()

    def finish(self) -> None:
        """Leave the state that the first replica left, as one device would."""
        self._seeds.finish()
        if self._after_first is not None:
            self._after_first.restore()

    def _state(self) -> "_Attributes":
        return _Attributes(self._objects, self._containers)


def _holders_of_state(objects: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Objects with those of a program's own classes that they lead to, and containers in others."""
    found = list(objects)
    seen = {id(one) for one in found}
    containers: list[Any] = []
    ahead: deque[Any] = deque(found)
    while ahead:
        one = ahead.popleft()
        if isinstance(one, dict):
            inner: Iterable[Any] = one.values()
        else:
            inner = one if isinstance(one, (list, tuple, set, deque)) else vars(one).values()
        for value in list(inner):
            if id(value) in seen:
                continue
            if type(value) in _BASES or type(value) is tuple:
                seen.add(id(value))
                if type(value) in _BASES:
                    containers.append(value)
                if len(value) <= _LONGEST:
                    ahead.append(value)
            elif _is_programs_own(value):
                seen.add(id(value))
                found.append(value)
                ahead.append(value)
    return found, containers


def _is_programs_own(value: Any) -> bool:
    """Whether it is a plain object of a class that the program itself defines."""
    cls = type(value)
    if cls is types.SimpleNamespace:
        return True
    if type(getattr(value, "__dict__", None)) is not dict:
        return False
    root = cls.__module__.partition(".")[0]
    is_standard = root == "unisono" or root in sys.stdlib_module_names - {"__main__"}
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
    # Objects of packages may be in use by threads of their own.
    is_installed = "site-packages" in file or "dist-packages" in file
    return not (is_standard or is_installed)


class _BareVariables:
    """Variables of TensorFlow in attributes: Keras does not know them, and they have no copies.

    The first replica uses the variable itself, every other one a copy, which is set to the
    variable's value when a step begins. Made in the thread that runs the step.
    """

    def __init__(self, objects: Iterable[Any], other_devices: Iterable[str]) -> None:
        self._places = [
            (vars(one), name, value)
            for one in objects
            for name, value in vars(one).items()
            if isinstance(value, tf.Variable)
            and not isinstance(value, tf.distribute.DistributedValues)
        ]
        known = {id(variable): variable for _, _, variable in self._places}
        self._copies = {i: _copies_of(v, list(other_devices)) for i, v in known.items()}
        # Read before any replica writes.
        self._values = {i: tf.identity(variable) for i, variable in known.items()}

    def use(self, replica: int) -> None:
        """Give a replica, whose thread this is, its own."""
        if replica == 0:
            return
        for i, value in self._values.items():
            self._copies[i][replica - 1].assign(value)
        for attributes, name, variable in self._places:
            attributes[name] = self._copies[id(variable)][replica - 1]


def _copies_of(variable: Any, devices: list[str]) -> list[Any]:
    copies: list[Any] = vars(variable).setdefault(COPIES, [])
    if missing := devices[len(copies) :]:
        # In a thread that traces no graph: a function that makes variables is traced twice.
        with ThreadPoolExecutor(1) as outside:
            copies += outside.map(functools.partial(_copy_of, variable), missing)
    return copies


def _copy_of(variable: Any, device: str) -> Any:
    with tf.device(device):
        return tf.Variable(
            tf.zeros(variable.shape, variable.dtype),
            trainable=variable.trainable,
            name=variable.name.partition(":")[0],
        )


class _Attributes:
    """The attributes of some objects as they are now, with the contents of lists, dicts and sets.

    Restored past the trackers of Keras and TensorFlow, which intercept assignments.
    """

    def __init__(self, objects: Iterable[Any], containers: Iterable[Any]) -> None:
        self._attributes = [(vars(o), dict(vars(o))) for o in objects]
        every = {id(value): value for value in containers}
        for _, kept in self._attributes:
            every.update((id(value), value) for value in kept.values() if type(value) in _BASES)
        self._contents = [(value, _BASES[type(value)](value)) for value in every.values()]

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
