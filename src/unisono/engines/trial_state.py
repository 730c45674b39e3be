"""Try a step of a model and leave no trace: its state is put back, and its random numbers repeat.

For a step on a few rows and on the same rows twice: what it draws for a row must be the same both
times, whichever function draws it. While such a step runs, and in its thread only, the functions
that draw are replaced, and dropout is off.
"""

import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src import backend as keras_backend
from keras.src.backend.common.global_state import get_global_attribute
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

from unisono.engines.parts import leaf_metrics, optimizers_of, with_inner
from unisono.engines.patches import Patch

_thread = threading.local()
_DRAWS = (
    *("normal", "uniform", "truncated_normal", "randint", "categorical", "shuffle", "gamma"),
    *("binomial", "beta", "randn", "randn_like", "rand", "rand_like", "bernoulli", "multinomial"),
)


class Draws:
    """The random numbers of a step: kept at its first run, and given again at later ones."""

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
        drawn = plain(*args, **kwargs)
        place, self._place = self._place, self._place + 1
        if place == len(self._kept):
            self._kept.append(ops.stop_gradient(drawn))
        elif place < len(self._kept):
            kept = self._kept[place]
            if kept.shape == drawn.shape:
                return kept
            if kept.shape and tuple(drawn.shape) == (2 * kept.shape[0], *kept.shape[1:]):
                return ops.concatenate([kept, kept])
        return ops.stop_gradient(drawn)


@contextmanager
def restored(model: keras.Model) -> Iterator[None]:
    """Put back whatever a step inside changes: variables, attributes, the states of generators."""
    variables = _variables_of(model)
    values = [ops.copy(ops.stop_gradient(v.value)) for v in variables]
    attributes = [(layer, _attributes_of(layer)) for layer in model._flatten_layers()]
    put_back = [*_generators(), *_gradients(model), *_native_state(model)]
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


def _variables_of(model: keras.Model) -> list[Any]:
    found = [*model.variables]
    found += [v for metric in leaf_metrics(model) for v in metric.variables]
    # Slots are an optimizer's own; what programs write are its learning rate and its counters.
    for optimizer in with_inner(optimizers_of(model)):
        found += [v for v in optimizer.variables if not v.shape]
    seeds = get_global_attribute(GLOBAL_SEED_GENERATOR)
    found += [] if seeds is None else [seeds.state]
    return list({id(v): v for v in found if v._value is not None}.values())


def _attributes_of(layer: Any) -> dict[str, Any]:
    """Numbers, and what is in lists: counters and records that a program keeps."""
    # Keras' own say what has been built, which stays so.
    names = [name for name in vars(layer) if name == "_losses" or not name.startswith("_")]
    values = {name: vars(layer)[name] for name in names if name != "built"}
    kept = {k: v for k, v in values.items() if isinstance(v, (int, float))}
    return kept | {k: (v, list(v)) for k, v in values.items() if isinstance(v, list)}


def _put_back_attributes(layer: Any, kept: dict[str, Any]) -> None:
    for name, value in kept.items():
        if isinstance(value, tuple):
            list.__setitem__(value[0], slice(None), value[1])  # Past those who track changes.
        elif isinstance(vars(layer).get(name), (int, float)):
            vars(layer)[name] = value


def _generators() -> list[Callable[[], Any]]:
    """Functions that put the states of random generators back."""
    found: list[Callable[[], Any]] = [
        functools.partial(random.setstate, random.getstate()),
        functools.partial(np.random.set_state, np.random.get_state()),
    ]
    if keras.backend.backend() == "torch":
        from unisono.engines.torch_devices import generators

        found += [functools.partial(g.set_state, g.get_state()) for g in generators()]
    else:
        from tensorflow.python.eager.context import context

        seeds = getattr(context(), "_rng", None)  # Of eager ops, once a seed was set.
        found += [] if seeds is None else [functools.partial(seeds.setstate, seeds.getstate())]
    return found


def _gradients(model: keras.Model) -> list[Callable[[], Any]]:
    if keras.backend.backend() != "torch":
        return []
    pairs = [(v.value, v.value.grad) for v in model.trainable_variables]
    for value, _ in pairs:
        value.grad = None

    def put_back() -> None:
        for value, gradient in pairs:
            value.grad = gradient

    return [put_back]


def _native_state(model: keras.Model) -> list[Callable[[], Any]]:
    """What layers keep by the backend's own means: counters, the moments of torch's batch norms."""
    layers = model._flatten_layers()
    if keras.backend.backend() == "torch":
        buffers = {id(b): b for layer in layers for b in layer.buffers()}.values()
        return [functools.partial(b.copy_, b.clone()) for b in buffers]
    import tensorflow as tf

    found = (v for layer in layers for v in vars(layer).values() if isinstance(v, tf.Variable))
    return [functools.partial(v.assign, tf.identity(v)) for v in found]


@functools.cache
def _patches() -> list[Patch]:
    """The functions that draw and drop, in threads that try a step."""
    draws = [(owner, name) for owner in _owners_of_draws() for name in _DRAWS]
    return [
        Patch(owner, name, make)
        for names, make in ((draws, _repeating), (_dropouts(), _keeping))
        for owner, name in names
        if hasattr(owner(), name)
    ]


def _repeating(plain: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        draws: Draws | None = getattr(_thread, "draws", None)
        return plain(*args, **kwargs) if draws is None else draws.draw(plain, *args, **kwargs)

    return function


def _keeping(plain: Callable[..., Any]) -> Callable[..., Any]:
    def dropout(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        is_tried = getattr(_thread, "draws", None) is not None
        return inputs if is_tried else plain(inputs, *args, **kwargs)

    return dropout


# Modules are looked up at each use: `import tensorflow.random` makes `tf.random` another object.


def _owners_of_draws() -> list[Callable[[], Any]]:
    if keras.backend.backend() == "torch":
        return [lambda: keras_backend.random, lambda: sys.modules["torch"]]
    return [lambda: keras_backend.random, lambda: sys.modules["tensorflow"].random]


def _dropouts() -> list[tuple[Callable[[], Any], str]]:
    if keras.backend.backend() == "torch":
        functional: Callable[[], Any] = lambda: sys.modules["torch"].nn.functional  # noqa: E731
    else:
        functional = lambda: sys.modules["tensorflow"].nn  # noqa: E731
    return [(lambda: keras_backend.random, "dropout"), (functional, "dropout")]
