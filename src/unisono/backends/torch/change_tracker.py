"""Notice which variables were changed outside of a step, by the versions that torch counts."""

from collections.abc import Sequence
from typing import Any


class Versions:
    """What variables looked like when they were last the same on all replicas."""

    def __init__(self) -> None:
        self.variables: list[Any] = []
        self._seen: dict[int, tuple[int, int, bool]] = {}

    def watch(self, variables: Sequence[Any]) -> None:
        """Look at these variables from now on; those that were not watched count as changed."""
        self.variables = list(variables)
        self._seen = {id(v): seen for v in variables if (seen := self._seen.get(id(v)))}

    def forget(self) -> None:
        """Take every variable for changed."""
        self._seen = {}

    def changed(self) -> list[int]:
        """The places of variables that differ from when they were noted."""
        return [i for i, v in enumerate(self.variables) if self._seen.get(id(v)) != _version(v)]

    def trainable(self) -> list[bool]:
        return [bool(variable._trainable) for variable in self.variables]

    def note(self) -> None:
        """All replicas have the same values now."""
        self._seen = {id(v): _version(v) for v in self.variables}


def _version(variable: Any) -> tuple[int, int, bool]:
    value = variable._value
    return id(value), value._version, bool(variable._trainable)
