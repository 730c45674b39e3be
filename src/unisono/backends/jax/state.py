"""The values of a model's variables as a compiled step takes and returns them.

Keras takes the values out of the variables while it trains. Here they stay there, where callbacks
read and write them: a step is given what the variables hold, and they are given what it returns.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras

# The state that Keras passes through a step, told apart by its length: predict, test, train.
_PARTS = {
    2: ("trainable_variables", "non_trainable_variables"),
    3: ("trainable_variables", "non_trainable_variables", "metrics_variables"),
    4: (
        "trainable_variables",
        "non_trainable_variables",
        "optimizer_variables",
        "metrics_variables",
    ),
}


class _Mesh(Protocol):
    def put(self, value: Any) -> Any:
        """A value as a step takes it."""

    def shown(self, array: Any) -> Any:
        """What a step returned, as a variable holds it."""


@dataclass
class _Value:
    """What a step last returned for a variable, as steps take it and as the variable has it."""

    array: Any = None
    shown: Any = None


class KnownValues:
    """What steps last returned for each variable; models that share variables share it too."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[Any, _Value]] = {}

    def of(self, variable: Any) -> _Value:
        key = id(variable)
        if key not in self._values:
            # Not a WeakKeyDictionary: variables compare by value.
            reference = weakref.ref(variable, lambda _: self._values.pop(key, None))
            self._values[key] = (reference, _Value())
        return self._values[key][1]


class StepState:
    """The state of one model's steps."""

    def __init__(self, model: keras.Model, mesh: _Mesh, known: KnownValues) -> None:
        self._model = model
        self._mesh = mesh
        self._known = known
        self._parts: list[list[tuple[Any, _Value]]] = []

    def get(self, *, purge_model_variables: bool = False, **parts: bool) -> tuple[Any, ...]:
        """As Keras' `_get_jax_state`, but the values stay in the variables."""
        self._list([part for part in _PARTS[4] if parts.get(part)])
        return self.seen()

    def sync(self) -> None:
        """As Keras' `jax_state_sync`; but the variables are never behind.

        What a callback wrote to one must not be undone.
        """
        self._model._jax_state_synced = True

    def list_like(self, state: Sequence[Any]) -> None:
        """List the variables of the step that this state belongs to."""
        if len(state) != len(self._parts):
            # A callback's own evaluate or predict has failed in between.
            self._list(_PARTS[len(state)])

    def take(self) -> tuple[Any, ...]:
        """The variables' values for a step, which may free them."""
        for variable, value in self._pairs():
            if value.array is None or variable._value is not value.shown:
                value.array = self._mesh.put(variable._value)
                value.shown = variable._value = self._mesh.shown(value.array)
        return tuple([value.array for _, value in part] for part in self._parts)

    def seen(self) -> tuple[Any, ...]:
        """The variables' values as they hold them, for a step that is not compiled."""
        return tuple([variable._value for variable, _ in part] for part in self._parts)

    def publish(self, state: Sequence[Sequence[Any]], *, is_placed: bool = True) -> None:
        """Give the variables what a step returned; `is_placed`: as a compiled step takes it."""
        for part, arrays in zip(self._parts, state, strict=True):
            for (variable, value), array in zip(part, arrays, strict=True):
                value.array = array if is_placed else None
                value.shown = variable._value = self._mesh.shown(array) if is_placed else array

    def changed(self) -> list[int]:
        """Positions of the variables that were written since the last step."""
        pairs = self._pairs()
        return [
            i for i, (variable, value) in enumerate(pairs) if variable._value is not value.shown
        ]

    def accept(self, places: Sequence[int], values: Sequence[Any]) -> None:
        """Give some variables values that need not be looked at again."""
        pairs = self._pairs()
        for place, given in zip(places, values, strict=True):
            variable, value = pairs[place]
            value.array, value.shown = None, given
            variable._value = given

    def show_as(self, change: Callable[[Any], Any]) -> None:
        """Have the variables hold the same values in another form."""
        for variable, value in self._pairs():
            if variable._value is value.shown:
                value.shown = variable._value = change(value.shown)

    def variables(self) -> list[Any]:
        """The variables of the step, by position."""
        return [variable for variable, _ in self._pairs()]

    def _pairs(self) -> list[tuple[Any, _Value]]:
        return [pair for part in self._parts for pair in part]

    def _list(self, parts: Sequence[str]) -> None:
        model = self._model
        lists = {
            "trainable_variables": lambda: model.trainable_variables,
            "non_trainable_variables": lambda: model.non_trainable_variables,
            "optimizer_variables": lambda: model.optimizer.variables,
            "metrics_variables": lambda: model.metrics_variables,
        }
        self._parts = [
            [(variable, self._known.of(variable)) for variable in lists[part]()] for part in parts
        ]
