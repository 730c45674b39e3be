"""How a program reaches an object inside a model: `model.layers[2].augmenter._rng`."""

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

_MOST_OBJECTS = 200_000
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType)


def path_of(
    model: keras.Model,
    candidates: Iterable[Any],
    attributes: Callable[[Any], Iterator[tuple[str, Any]]],
) -> tuple[str, Any] | None:
    """The shortest path to the first of some objects that has one, with that object.

    `attributes(obj)` are the names and values that an object with a dictionary leads to.
    """
    paths = _paths_from(model, attributes)
    return next(((paths[id(obj)], obj) for obj in candidates if id(obj) in paths), None)


def _paths_from(
    model: keras.Model, attributes: Callable[[Any], Iterator[tuple[str, Any]]]
) -> dict[int, str]:
    paths = {id(model): "model"}
    # By the names that a user knows, before those that Keras keeps them under.
    ahead: deque[Any] = deque([model])
    for index, layer in enumerate(model.layers):
        paths[id(layer)] = f"model.layers[{index}]"
        ahead.append(layer)
    while ahead and len(paths) < _MOST_OBJECTS:
        obj = ahead.popleft()
        for step, value in _steps(obj, attributes):
            if isinstance(value, _ATOMS) or id(value) in paths:
                continue
            paths[id(value)] = paths[id(obj)] + step
            ahead.append(value)
    return paths


def _steps(
    obj: Any, attributes: Callable[[Any], Iterator[tuple[str, Any]]]
) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
        obj = obj.__func__
    if isinstance(obj, types.FunctionType):
        for name, value in _captured(obj):
            yield f" (its variable {name!r})", value
    elif isinstance(obj, functools.partial):
        yield ".func", obj.func
        yield ".args", obj.args
        yield ".keywords", obj.keywords
    elif isinstance(obj, dict):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    if hasattr(obj, "__dict__"):
        yield from ((f".{name}", value) for name, value in attributes(obj))


def _captured(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function takes along when it is pickled by value."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # Not assigned yet.
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
