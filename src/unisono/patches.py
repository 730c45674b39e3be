"""A name of somebody else's module or class, replaced for as long as anybody needs it.

Several threads may need one at once, and leave in any order: the last one gives it back.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Patch:
    """Puts `make(plain)` in the place of `owner().name`."""

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
                return  # In use; or somebody has put something of theirs on top.
            if self._is_own:
                setattr(self._where, self._name, self._plain)
            else:
                delattr(self._where, self._name)
