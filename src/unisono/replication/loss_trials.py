"""Steps that are tried on a few rows and leave no trace, for loss_check.

Weights are not updated, all state is restored, and all trials draw the same random numbers for a
row, whichever function draws them. While a step is tried, in its thread only, the functions that
draw are replaced and dropout is off.
"""

import functools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from unisono.hooks import Patch
from unisono.keras_internals import (
    ADDED_LOSSES,
    global_seed_state,
    layers_of,
    random_module,
    value_of,
)
from unisono.replication.batch_norm import batch_norms
from unisono.replication.framework import framework
from unisono.replication.introspection import leaf_metrics, optimizers_of, with_inner

# Those of keras.random.
_DRAWS = (
    *("normal", "uniform", "truncated_normal", "randint", "categorical", "shuffle", "gamma"),
    *("binomial", "beta"),
)
_thread = threading.local()


@dataclass(frozen=True)
class TrialRows:
    """The rows of a trial, and the place of the replica that runs it."""

    parts: tuple[int, ...]
    """Which of the first two parts of a batch, in this order."""
    num_replicas: int = 1
    index: int = 0
    has_twin: bool = False
    """Whether the other replica has the same rows."""

    @property
    def is_split(self) -> bool:
        """Whether it belongs to the trials on different rows."""
        return self in (BOTH, FIRST, SECOND)


TWIN, TWICE = TrialRows((0,), 2, has_twin=True), TrialRows((0, 0))
BOTH, FIRST, SECOND = TrialRows((0, 1)), TrialRows((0,), 2, 0), TrialRows((1,), 2, 1)


class Gathers:
    """What replicas of a trial gather from each other, although they run one after the other.

    A twin has the same as this replica. Replicas with different rows get what was there when one
    replica ran on the rows of both.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        """Of one part."""
        self._kept: list[Any] = []
        self._place = 0
        self._rows = TWIN

    @contextmanager
    def of(self, rows: TrialRows) -> Iterator[None]:
        self._rows, self._place = rows, 0
        yield

    @property
    def num_same(self) -> int:
        """How many replicas add the same to an all-reduce; others are added up afterwards."""
        return self._rows.num_replicas if self._rows.has_twin else 1

    def every(self, x: Any, between: Callable[[Any, Any, Any], Any]) -> list[Any]:
        """x of all replicas, in order; `between(x, start, stop)` takes rows of it."""
        rows = self._rows
        if not rows.is_split:
            return [x] * rows.num_replicas
        place, self._place = self._place, self._place + 1
        if rows == BOTH:
            self._kept.append(x)
            return [x]
        kept, half = self._kept[place], self.num_rows
        return [x, between(kept, half, 2 * half)] if rows == FIRST else [between(kept, 0, half), x]


class Draws:
    """The random numbers of a step: kept at its first run, and given again at later ones.

    The same for all rows: a program may have drawn them for rows in any order, such as for those of
    two batches in one tensor.
    """

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._place = 0

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Run a step inside."""
        self._place = 0
        before = getattr(_thread, "draws", None)
        with ExitStack() as stack:
            for patch in _patches():
                stack.enter_context(patch.applied())
            _thread.draws = self
            try:
                yield
            finally:
                _thread.draws = before

    def draw(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        drawn = ops.stop_gradient(plain(*args, **kwargs))
        place, self._place = self._place, self._place + 1
        has_rows = bool(drawn.shape) and drawn.shape[0] > 0
        if place == len(self._kept):
            self._kept.append(drawn[0] if has_rows else drawn)
        kept = self._kept[place]
        if not has_rows:
            return kept if kept.shape == drawn.shape else drawn
        if tuple(kept.shape) != tuple(drawn.shape[1:]) or kept.dtype != drawn.dtype:
            return drawn
        return ops.repeat(kept[None], drawn.shape[0], axis=0)


@contextmanager
def restored(model: keras.Model) -> Iterator[None]:
    """Put back whatever a step inside changes: variables, attributes, the states of generators."""
    variables = _variables_of(model)
    values = [ops.copy(ops.stop_gradient(v.value)) for v in variables]
    attributes = [(layer, _attributes_of(layer)) for layer in layers_of(model)]
    put_back: list[Callable[[], Any]] = [
        functools.partial(random.setstate, random.getstate()),
        functools.partial(np.random.set_state, np.random.get_state()),
        *framework().trial_state(model),
    ]
    try:
        yield
    finally:
        for variable, value in zip(variables, values, strict=True):
            if not bool(ops.all(ops.equal(ops.stop_gradient(variable.value), value))):
                variable.assign(value)
        for layer, kept in attributes:
            _put_back_attributes(layer, kept)
        for put in put_back:
            put()


@contextmanager
def with_moving_statistics(model: keras.Model) -> Iterator[None]:
    """Have batch norm use its moving statistics: replicas that run one after the other do not know
    those of the rows of both."""
    before = [(vars(layer), vars(layer).get("call"), layer.call) for layer in batch_norms(model)]
    for attributes, _, call in before:
        attributes["call"] = functools.partial(_not_training, call)
    try:
        yield
    finally:
        for attributes, own, _ in before:
            attributes.pop("call")
            if own is not None:
                attributes["call"] = own


def _not_training(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs | {"training": False})


def _variables_of(model: keras.Model) -> list[Any]:
    found = [*model.variables]
    found += [v for metric in leaf_metrics(model) for v in metric.variables]
    # Slots are an optimizer's own; what programs write are its learning rate and its counters.
    for optimizer in with_inner(optimizers_of(model)):
        found += [v for v in optimizer.variables if not v.shape]
    seeds = global_seed_state()
    found += [] if seeds is None else [seeds]
    return list({id(v): v for v in found if value_of(v) is not None}.values())


def _attributes_of(layer: Any) -> dict[str, Any]:
    """Numbers, and what is in lists: counters and records that a program keeps."""
    # Keras' own say what has been built, which stays so.
    names = [name for name in vars(layer) if name == ADDED_LOSSES or not name.startswith("_")]
    values = {name: vars(layer)[name] for name in names if name != "built"}
    kept = {k: v for k, v in values.items() if isinstance(v, (int, float))}
    return kept | {k: (v, list(v)) for k, v in values.items() if isinstance(v, list)}


def _put_back_attributes(layer: Any, kept: dict[str, Any]) -> None:
    for name, value in kept.items():
        if isinstance(value, tuple):
            list.__setitem__(value[0], slice(None), value[1])  # Past those who track changes.
        elif isinstance(vars(layer).get(name), (int, float)):
            vars(layer)[name] = value


def _patches() -> list[Patch]:
    """The functions that draw and drop, in threads that try a step.

    Looked up for each trial: `import tensorflow.random` makes `tf.random` another object.
    """
    of_keras = random_module()
    draws = [*((of_keras, name) for name in _DRAWS), *framework().drawing_functions()]
    dropouts = [(of_keras, "dropout"), *framework().dropout_functions()]
    makes = {"shuffle": _keeping, "randperm": _sorting}
    return [
        *(_patch(module, name, makes.get(name, _repeating)) for module, name in draws),
        *(_patch(module, name, _keeping) for module, name in dropouts),
    ]


@functools.cache
def _patch(module: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> Patch:
    """One for each function: a patch counts its users."""
    return Patch(lambda: module, name, make)


def _repeating(plain: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        draws: Draws | None = getattr(_thread, "draws", None)
        return plain(*args, **kwargs) if draws is None else draws.draw(plain, *args, **kwargs)

    return function


def _sorting(plain: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        drawn = plain(*args, **kwargs)
        return drawn if getattr(_thread, "draws", None) is None else ops.sort(drawn)

    return function


def _keeping(plain: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        if getattr(_thread, "draws", None) is None:
            return plain(*args, **kwargs)
        return next(iter((*args, *kwargs.values())))  # The first parameter is what is changed.

    return function
