"""The values of a model's variables as a compiled step takes and returns them.

Keras takes the values out of the variables while it trains. Here they stay there, where callbacks
read and write them: a step is given what the variables hold, and they are given what it returns.
A variable holds an array of this process; the step takes an array of the mesh.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from unisono.backends.jax.mesh import ReplicaMesh, process_mesh
from unisono.hooks import bind, original, unbind

# The state that Keras passes through a step, recognized by its length: predict, test, train.
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


@dataclass
class _Value:
    """What a step last returned for a variable."""

    array: Any = None
    """As a step takes it; None if the variable was given another value."""
    held: Any = None
    """As the variable holds it."""


class _KnownValues:
    """What steps of one mesh last returned for each variable, also of models that share some."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[Any, _Value]] = {}

    def of(self, variable: Any) -> _Value:
        key = id(variable)
        if key not in self._values:
            # Not a WeakKeyDictionary: variables compare by value.
            reference = weakref.ref(variable, lambda _: self._values.pop(key, None))
            self._values[key] = (reference, _Value())
        return self._values[key][1]


_known: "weakref.WeakKeyDictionary[ReplicaMesh, _KnownValues]" = weakref.WeakKeyDictionary()


class ModelState:
    """The state of one model's steps."""

    def __init__(self, model: keras.Model, mesh: ReplicaMesh) -> None:
        self._model = model
        self._mesh = mesh
        self._known = _known.setdefault(mesh, _KnownValues())
        self._parts: list[list[tuple[Any, _Value]]] = []

    def get(self, *, purge_model_variables: bool = False, **parts: bool) -> tuple[Any, ...]:
        """As Keras' `_get_jax_state`, but the values stay in the variables."""
        self._list([part for part in _PARTS[4] if parts.get(part)])
        return self.held()

    def sync(self) -> None:
        """As Keras' `jax_state_sync`; but the variables are always up to date.

        What a callback wrote to one must not be undone.
        """
        self._model._jax_state_synced = True

    def list_like(self, state: Sequence[Any]) -> None:
        """List the variables of the step that this state belongs to."""
        if len(state) != len(self._parts):
            # A callback's own evaluate or predict has failed in between.
            self._list(_PARTS[len(state)])

    def list_all(self) -> None:
        """List all variables of the model, as a train step does if there is one."""
        model = self._model
        has_optimizer = model.compiled and model.optimizer is not None
        self._list(_PARTS[4] if has_optimizer else _PARTS[2])

    def take(self) -> tuple[Any, ...]:
        """The variables' values for a compiled step, which may free them."""
        for variable, value in self._pairs():
            if value.array is None or variable._value is not value.held:
                value.array = self._mesh.put(variable._value)
                value.held = variable._value = self._mesh.own(value.array)
        return tuple([value.array for _, value in part] for part in self._parts)

    def held(self) -> tuple[Any, ...]:
        """The variables' values as they hold them."""
        return tuple([variable._value for variable, _ in part] for part in self._parts)

    def publish(self, state: Sequence[Sequence[Any]], *, is_placed: bool = True) -> None:
        """Give the variables what a step returned; `is_placed`: as arrays of the mesh."""
        for part, arrays in zip(self._parts, state, strict=True):
            for (variable, value), array in zip(part, arrays, strict=True):
                value.array = array if is_placed else None
                value.held = variable._value = self._mesh.own(array) if is_placed else array

    def changed(self) -> list[int]:
        """Positions of the variables that were written since the last step."""
        pairs = self._pairs()
        return [i for i, (variable, value) in enumerate(pairs) if variable._value is not value.held]

    def accept(self, positions: Sequence[int], values: Sequence[Any]) -> None:
        """Give some variables values that then count as unchanged."""
        pairs = self._pairs()
        for position, given in zip(positions, values, strict=True):
            variable, value = pairs[position]
            value.array = None
            value.held = variable._value = given

    def convert(self, change: Callable[[Any], Any]) -> None:
        """Have the variables hold the same values in another form."""
        for variable, value in self._pairs():
            if variable._value is value.held:
                value.held = variable._value = change(value.held)

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


def save_together(callback: Any) -> None:
    """Have keras.callbacks.OrbaxCheckpoint save arrays of the mesh in a run of several processes.

    Orbax saves with all processes together and refuses arrays of a single process, which is what
    variables hold. While it saves it is given the same values as replicated arrays.
    """
    mesh = process_mesh()

    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        model = callback.model

        def get_state_tree(*args: Any, **kwargs: Any) -> Any:
            tree = original(model, "get_state_tree")(*args, **kwargs)
            return keras.tree.map_structure(mesh.put, tree)

        bind(model, "get_state_tree", get_state_tree)
        try:
            return original(callback, "_save_checkpoint")(*args, **kwargs)
        finally:
            unbind(model, "get_state_tree")

    bind(callback, "_save_checkpoint", save_checkpoint)
