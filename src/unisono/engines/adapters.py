"""Keras' adapters of arrays, changed on their way to it.

Keras asks one function for its adapters; here ours stands before it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

_thread = threading.local()
_keras_own: Callable[..., Any] = data_adapters.get_data_adapter


@contextmanager
def changing_arrays(change: Callable[[ArrayDataAdapter], Any]) -> Iterator[None]:
    """Have Keras read arrays that it is given inside by `change(adapter)`."""
    before = getattr(_thread, "change", None)
    _thread.change = change
    data_adapters.get_data_adapter = _get_data_adapter
    try:
        yield
    finally:
        _thread.change = before


def _get_data_adapter(*args: Any, **kwargs: Any) -> Any:
    adapter = _keras_own(*args, **kwargs)
    change = getattr(_thread, "change", None)
    if change is None or type(adapter) is not ArrayDataAdapter:
        return adapter
    return change(adapter)
