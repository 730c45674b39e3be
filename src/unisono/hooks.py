"""Replace methods: of one object for as long as it is parallel, of a module while it is needed.

`bind` leaves the class as it is, so files, pickles, clones and `isinstance` see an ordinary Keras
object. Writing to the instance dictionary keeps the trackers of Keras, TensorFlow and torch, all
of which intercept attribute assignment, from recording a function as part of the model.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar


def bind(target: Any, name: str, function: Callable[..., Any]) -> None:
    """Make `target.name(...)` call `function(...)`; the class's own method stays reachable."""
    vars(target)[name] = _Hook(function)


def bind_in_step(
    target: Any, name: str, function: Callable[..., Any], current: Callable[[], Any]
) -> bool:
    """Call `function(replica, target, plain, ...)` while a replica's step runs, else the class's.

    `current()` is that replica or None. Returns whether it was bound: an earlier binding stays.
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
    """A bound function, recognizable when its object is pickled for another process."""

    is_unisono_hook = True
    autograph_info__: ClassVar[dict[str, Any]] = {}  # AutoGraph leaves it as it is.

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


class Patch:
    """Replaces `owner().name` by `make(plain)` for as long as anybody needs it.

    Several threads may apply it at once and lift it in any order; the last one restores the name.
    """

    def __init__(
        self, owner: Callable[[], Any], name: str, make: Callable[[Callable[..., Any]], Any]
    ) -> None:
        self._owner = owner
        self._name = name
        self._make = make
        self._lock = threading.Lock()
        self._num_users = 0

    @contextmanager
    def applied(self) -> Iterator[None]:
        self.apply()
        try:
            yield
        finally:
            self.lift()

    def apply(self) -> None:
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                self._where = self._owner()
                self._is_own = self._name in vars(self._where)
                self._plain = getattr(self._where, self._name)
                self._ours = self._make(self._plain)
                setattr(self._where, self._name, self._ours)

    def lift(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users or vars(self._where).get(self._name) is not self._ours:
                return  # Still in use, or patched again by somebody else.
            if self._is_own:
                setattr(self._where, self._name, self._plain)
            else:
                delattr(self._where, self._name)
