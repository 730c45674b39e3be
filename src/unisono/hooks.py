"""Bind an engine's versions of methods to one object, leaving its class alone.

The class stays the user's, so files, pickles, clones and `isinstance` see an ordinary Keras
object. Writing to the instance dictionary keeps the trackers of Keras, TensorFlow and torch, all
of which intercept attribute assignment, from recording a function as part of the model.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar


def bind(target: Any, name: str, function: Callable[..., Any]) -> None:
    """Make `target.name(...)` call `function(...)`; the class's own method stays reachable."""
    vars(target)[name] = _Hook(function)


def bind_in_step(
    target: Any, name: str, function: Callable[..., Any], current: Callable[[], Any]
) -> bool:
    """Call `function(replica, target, plain, ...)` while a replica's step runs, else the class's.

    `current()` is that replica or None. Says whether it was bound: what is bound already stays.
    """
    if name in vars(target):
        return False

    def hooked(*args: Any, **kwargs: Any) -> Any:
        replica = current()
        plain = original(target, name)
        if replica is None:
            return plain(*args, **kwargs)
        return function(replica, target, plain, *args, **kwargs)

    bind(target, name, hooked)
    return True


class _Hook:
    """A function of ours on somebody else's object, recognizable when the object is carried."""

    is_unisono_hook = True
    autograph_info__: ClassVar[dict[str, Any]] = {}  # Tells TensorFlow not to rewrite its source.

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def unbind(target: Any, *names: str) -> None:
    """Give the class's own methods back."""
    for name in names:
        vars(target).pop(name, None)


def original(target: Any, name: str) -> Callable[..., Any]:
    """The method that the class itself defines, bound to the object."""
    method: Callable[..., Any] = getattr(type(target), name).__get__(target)
    return method
