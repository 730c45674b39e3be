"""What the exactness algorithm needs from the framework under Keras, and which one is in use.

Replicas must agree on more than Keras' variables: random generators, optimizers that a framework
brings itself, gradients that it keeps. This package does not import `unisono.backends`, which
registers a function that finds the framework of Keras' backend.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Attribute = tuple[Any, str]
"""A module and the name of a function in it."""


class FrameworkState(Protocol):
    """The state that one framework keeps beside Keras' variables."""

    name: str
    """As Keras names the backend, and Python the module."""
    donates_buffers: bool
    """Whether a compiled step frees the arrays of the variables that it is given."""

    def set_seed(self, seed: int) -> None:
        """Seed the framework's own generators, where Keras programs draw from them."""

    def random_state(self) -> Any:
        """The state of those generators as plain data (None, numbers, strings, lists)."""

    def set_random_state(self, state: Any) -> None:
        """Restore what `random_state` returned, maybe in another process."""

    def native_optimizers(self, model: Any) -> list[Any]:
        """The optimizers of the framework's own that a model holds."""

    def native_optimizer_state(self, model: Any) -> list[tuple[str, Any]]:
        """The tensors that native optimizers keep for a model's variables, with names."""

    def trial_state(self, model: Any) -> list[Callable[[], Any]]:
        """Clear what would disturb a trial of a step; functions that restore all that it changes.

        That is what the framework keeps outside of Keras' variables: generators, gradients,
        buffers. Called before the trial.
        """

    def drawing_functions(self) -> Sequence[Attribute]:
        """Modules and names of the framework's functions that draw random numbers."""

    def dropout_functions(self) -> Sequence[Attribute]:
        """Modules and names of the framework's dropout functions."""

    def is_saved_collectively(self, callback: Any) -> bool:
        """Whether a callback saves by a collective of all processes, so that all must run it."""

    def save_collectively(self, callback: Any) -> None:
        """Give such a callback the arrays of all processes to save."""


_find: Callable[[], FrameworkState] | None = None


def register(find: Callable[[], FrameworkState]) -> None:
    """Set the function that finds the framework of Keras' backend."""
    global _find
    _find = find


def framework() -> FrameworkState:
    """The framework of Keras' backend in this process."""
    assert _find is not None, "unisono.backends registers it when unisono is imported"
    return _find()
