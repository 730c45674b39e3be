"""Detects what a program writes to variables between steps, and takes over what the chief wrote.

A callback that sets weights or a learning rate, a file that is loaded: all of them call a method of
the tf.Variable. Writes inside a program's own tf.function are not detected.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from unisono.backends.tensorflow.collectives import Group
from unisono.backends.tensorflow.replica import current_replica
from unisono.replication.step import seed_stride

_WRITES = (
    "assign",
    "assign_add",
    "assign_sub",
    "batch_scatter_update",
    "scatter_add",
    "scatter_div",
    "scatter_max",
    "scatter_min",
    "scatter_mul",
    "scatter_nd_add",
    "scatter_nd_sub",
    "scatter_nd_update",
    "scatter_sub",
    "scatter_update",
    "_restore_from_tensors",
)


class ChangeTracker:
    """The variables of one model, whose values must be equal in all processes."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._variables: list[Any] = []
        self._known_writes: dict[int, tuple[Any, int]] = {}
        self._clock = -1

    def track(self, variables: Iterable[Any]) -> None:
        """Track exactly these; what was not tracked before counts as written."""
        self._variables = [
            v for v in {id(v): v for v in variables}.values() if v._value is not None
        ]
        for variable in self._variables:
            _track(variable._value)
        held = {id(v._value) for v in self._variables}
        self._known_writes = {key: kept for key, kept in self._known_writes.items() if key in held}
        if len(self._known_writes) < len(held):
            self._clock = -1

    def release(self) -> None:
        for variable in self._variables:
            _untrack(variable._value)

    def changed(self) -> list[int]:
        """The positions of variables that were written since they were last taken over."""
        if self._clock == _Clock.num_writes:
            return []
        return [i for i, v in enumerate(self._variables) if not self._is_known(v._value)]

    def describe(self) -> list[str]:
        return [f"{v.name} {tuple(v.shape)} {v.dtype}" for v in self._variables]

    def take_over(self, positions: Sequence[int]) -> None:
        """Give variables the chief's values; seeds get a stream of their own in each process."""
        chosen = [self._variables[i] for i in positions]
        if chosen:
            values = self._group.broadcast([v._value for v in chosen], root=0)
            for variable, value in zip(chosen, values, strict=True):
                is_seed = variable.name == "seed_generator_state"
                variable._value.assign(_own_seed(value, self._group.rank) if is_seed else value)
                self._known_writes[id(variable._value)] = (variable._value, _num_writes(variable))
        if not self.changed():
            self._clock = _Clock.num_writes

    def _is_known(self, value: Any) -> bool:
        kept = self._known_writes.get(id(value))
        return kept is not None and kept[1] == value.num_writes


class _Clock:
    """Counts writes to all tracked variables, so that each is looked at only after a write."""

    num_writes = 0


def _num_writes(variable: Any) -> int:
    count: int = variable._value.num_writes
    return count


def _own_seed(state: Any, rank: int) -> Any:
    first, second = (int(word) for word in state.numpy())
    return tf.constant([(first + rank * seed_stride()) % 2**32, second], state.dtype)


def _track(value: Any) -> None:
    if not hasattr(value, "num_writes"):
        cls: Any = type(value)
        value.__class__ = _tracked(cls)


def _untrack(value: Any) -> None:
    if hasattr(value, "num_writes"):
        value.__class__ = type(value).__mro__[1]


@functools.cache
def _tracked(cls: type) -> type:
    """A subclass of a class of variables that counts the writes to each."""
    methods = {name: _counting(name, getattr(cls, name)) for name in _WRITES if hasattr(cls, name)}
    tracked: type = type(cls)(cls.__name__, (cls,), {"num_writes": 0, **methods})
    return tracked


def _counting(name: str, write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly() and current_replica() is None:
            self.num_writes += 1
            _Clock.num_writes += 1
        return write(self, *args, **kwargs)

    return counting
