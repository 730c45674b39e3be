"""Random numbers of one device for replicas that see their own rows, for `unisono verify --exact`.

Normally each replica draws from a stream of its own. Here all have the same stream, and each draw
of a replica's rows becomes one of the global batch, of which the replica takes its rows: then
dropout and noise are those of one device, and nets with them can be compared. It costs the draws of
all replicas on each, so it is for comparisons only.

Covered are Keras' random functions, and torch's by the names that programs call. TensorFlow's own
stateful ops (`tf.random.normal` in a step) draw by their place in a graph, which replicas change.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from unisono.keras_internals import random_module
from unisono.replication.framework import framework

EXACT = "UNISONO_VERIFY_EXACT"
"""Set to 1, replicas draw the random numbers of one device."""

_SHAPED = ("normal", "uniform", "truncated_normal", "randint", "gamma", "binomial", "beta")
_OF_ROWS = ("categorical", "shuffle")
_installed: set[tuple[int, str]] = set()
_is_drawing = False


def is_exact() -> bool:
    """Whether replicas are to draw the random numbers of one device."""
    return os.environ.get(EXACT) == "1"


def draw_for_batch(current: Callable[[], Any]) -> None:
    """Have random functions draw for the global batch while a replica's step runs.

    `current()` is that replica or None. Once in a process, and for good.
    """
    if not is_exact():
        return
    of_keras = random_module()
    for name in _SHAPED:
        _replace(of_keras, name, functools.partial(_shaped, current))
    for name in _OF_ROWS:
        _replace(of_keras, name, functools.partial(_of_rows, current))
    _replace(of_keras, "dropout", functools.partial(_dropout, current))
    for module, name in framework().drawing_functions():
        if module.__name__ == "torch":
            make = _like if name.endswith("_like") else _sized
            _replace(module, name, functools.partial(make, current))
    for module, name in framework().dropout_functions():
        if module.__name__.startswith("torch"):
            _replace(module, name, functools.partial(_dropout, current))


def _replace(module: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
    if (id(module), name) in _installed:
        return
    _installed.add((id(module), name))
    plain = getattr(module, name)
    setattr(module, name, functools.wraps(plain)(make(plain)))


class _Rows:
    """The rows of a replica in the midst of its step."""

    def __init__(self, replica: Any) -> None:
        self.start, self.stop = replica.bounds
        self.count = replica.num_rows
        self.own = self.stop - self.start

    def factor(self, size: Any) -> Any:
        """How many entries of a first dimension of this size belong to a row; 0 for none.

        A size that is known before a graph runs is not that of a batch; outside of graphs, one that
        equals the rows of the replica is.
        """
        if not isinstance(size, int):
            return size // self.own
        own = _static(self.own)
        return 1 if own is not None and size == own else 0

    def own_part(self, drawn: Any, factor: Any) -> Any:
        return drawn[self.start * factor : self.stop * factor]


def _static(value: Any) -> int | None:
    if isinstance(value, int):
        return value
    try:
        return int(value)
    except (TypeError, ValueError):  # Of a graph.
        return None


def _drawing(current: Callable[[], Any]) -> _Rows | None:
    """The rows to draw for; None outside of steps, in trials, and inside of another draw."""
    replica = None if _is_drawing or not is_exact() else current()
    if replica is None or replica.state.trial is not None:
        return None
    return _Rows(replica)


def _drawn(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global _is_drawing
    _is_drawing = True
    try:
        return plain(*args, **kwargs)
    finally:
        _is_drawing = False


def _shaped(current: Callable[[], Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def function(shape: Any, *args: Any, **kwargs: Any) -> Any:
        rows = _drawing(current)
        sizes = _sizes(shape)
        factor = rows.factor(sizes[0]) if rows is not None and sizes else 0
        if rows is None or _is_none(factor):
            return plain(shape, *args, **kwargs)
        drawn = _drawn(plain, (rows.count * factor, *sizes[1:]), *args, **kwargs)
        return rows.own_part(drawn, factor)

    return function


def _of_rows(current: Callable[[], Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Of functions that draw by values: those of all rows are needed."""

    def function(x: Any, *args: Any, **kwargs: Any) -> Any:
        rows = _drawing(current)
        x = ops.convert_to_tensor(x)
        factor = rows.factor(ops.shape(x)[0]) if rows is not None and len(x.shape) else 0
        if rows is None or _is_none(factor):
            return plain(x, *args, **kwargs)
        gathered = current().gather_rows(x)
        return rows.own_part(_drawn(plain, gathered, *args, **kwargs), factor)

    return function


def _dropout(current: Callable[[], Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def dropout(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rows = _drawing(current)
        sizes = ops.shape(inputs) if len(getattr(inputs, "shape", ())) else ()
        noise_shape: Any = kwargs.get("noise_shape", args[1] if len(args) > 1 else None)
        is_shaped = isinstance(noise_shape, (tuple, list))
        is_shared = is_shaped and noise_shape[0] == 1 and not _is_symbolic(noise_shape[0])
        factor = rows.factor(sizes[0]) if rows is not None and sizes and not is_shared else 0
        if rows is None or _is_none(factor) or not kwargs.get("training", True):
            return plain(inputs, *args, **kwargs)
        if is_shaped and noise_shape[0] is not None:
            whole = (rows.count * factor, *noise_shape[1:])
            if "noise_shape" in kwargs:
                kwargs["noise_shape"] = whole
            else:
                args = (args[0], whole, *args[2:])
        kwargs.pop("inplace", None)
        ones = _ones(inputs, (rows.count * factor, *sizes[1:]))
        return inputs * rows.own_part(_drawn(plain, ones, *args, **kwargs), factor)

    return dropout


def _sized(current: Callable[[], Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Of torch's functions that take sizes, one by one or in a tuple."""

    def function(*args: Any, **kwargs: Any) -> Any:
        rows = _drawing(current)
        is_tuple = bool(args) and isinstance(args[0], (tuple, list))
        sizes = list(args[0]) if is_tuple else [a for a in args if isinstance(a, int)]
        if rows is None or not sizes or (not is_tuple and len(sizes) != len(args)):
            return plain(*args, **kwargs)
        factor = rows.factor(int(sizes[0]))
        if _is_none(factor):
            return plain(*args, **kwargs)
        whole = (rows.count * factor, *sizes[1:])
        rest = args[1:] if is_tuple else ()
        return rows.own_part(_drawn(plain, whole, *rest, **kwargs), factor)

    return function


def _like(current: Callable[[], Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def function(inputs: Any, **kwargs: Any) -> Any:
        rows = _drawing(current)
        factor = rows.factor(int(inputs.shape[0])) if rows is not None and inputs.ndim else 0
        if rows is None or _is_none(factor):
            return plain(inputs, **kwargs)
        ones = _ones(inputs, (rows.count * factor, *inputs.shape[1:]))
        return rows.own_part(_drawn(plain, ones, **kwargs), factor)

    return function


def _ones(inputs: Any, sizes: Sequence[Any]) -> Any:
    """Ones for the rows of all replicas, in memory as those of this one are."""
    if framework().name != "torch":
        return ops.ones(sizes, dtype=inputs.dtype)
    import torch

    # torch draws in the order of memory. Rows come first in it, so that other strides stay.
    strides = inputs.stride()
    if strides[0] != max(strides):
        return torch.ones(tuple(sizes), dtype=inputs.dtype, device=inputs.device)
    ones = torch.empty_strided(tuple(sizes), strides, dtype=inputs.dtype, device=inputs.device)
    return ones.fill_(1)


def _sizes(shape: Any) -> list[Any]:
    if isinstance(shape, (tuple, list)):
        return list(shape)
    if keras.ops.is_tensor(shape) and len(shape.shape) == 1 and shape.shape[0] is not None:
        return [shape[i] for i in range(shape.shape[0])]
    return []


def _is_symbolic(value: Any) -> bool:
    return not isinstance(value, (int, type(None)))


def _is_none(factor: Any) -> bool:
    return isinstance(factor, int) and factor == 0
