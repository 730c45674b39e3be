"""Keras' adapters of arrays, changed on their way to it.

Keras asks one function for its adapters; while a call of ours runs, one of ours stands before it.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from unisono.patches import Patch

_thread = threading.local()


@contextmanager
def changing_arrays(change: Callable[[ArrayDataAdapter], Any]) -> Iterator[None]:
    """Have Keras read arrays that this thread gives it inside by `change(adapter)`."""
    before = getattr(_thread, "change", None)
    _thread.change = change
    try:
        with _patch.applied():
            yield
    finally:
        _thread.change = before


def _changing(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def get_data_adapter(*args: Any, **kwargs: Any) -> Any:
        adapter = plain(*args, **kwargs)
        change = getattr(_thread, "change", None)
        if change is None or type(adapter) is not ArrayDataAdapter:
            return adapter
        return change(adapter)

    return get_data_adapter


_patch = Patch(lambda: data_adapters, "get_data_adapter", _changing)
