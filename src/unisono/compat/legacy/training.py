"""Training as Keras 2 spelled it: generators, how they are loaded, metrics, losses."""

import ast
import functools
from collections.abc import Callable
from typing import Any

from unisono.compat.knowledge import LOADING, METHODS, Method
from unisono.compat.legacy import files, keys
from unisono.compat.legacy.lines import announce
from unisono.launch.client import current_world

_METHODS = {method.old: method for method in METHODS}


class Reduction:
    """`keras.losses.Reduction`; AUTO was the mean over the batch wherever `fit` was used."""

    AUTO = "sum_over_batch_size"
    NONE = "none"
    SUM = "sum"
    SUM_OVER_BATCH_SIZE = "sum_over_batch_size"

    @classmethod
    def all(cls) -> tuple[str, ...]:
        return cls.AUTO, cls.NONE, cls.SUM, cls.SUM_OVER_BATCH_SIZE


def patch(keras: Any) -> None:
    model = keras.Model
    if "fit_generator" in vars(model):
        return
    for name in ("fit_generator", "evaluate_generator", "predict_generator"):
        setattr(model, name, _with_generator(_METHODS[name]))
    for name in ("fit", "evaluate", "predict"):
        setattr(model, name, _with_loading(getattr(model, name)))
    model.predict_proba = _renamed("predict_proba", "model.")
    model.predict_classes = _predict_classes
    model.reset_states = _reset_layers
    keras.metrics.Metric.reset_states = _renamed("reset_states", "metric.")
    keys.patch(keras)
    files.patch(keras)


def _with_generator(method: Method) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        announce(f"model.{method.old}", method.write)
        given = dict(zip(method.parameters, args, strict=False)) | kwargs
        given = {name: ast.literal_eval(text) for name, text in method.defaults.items()} | given
        loading = {name: given.pop(name) for name in method.dropped if name in given}
        given = {method.renamed.get(name, name): value for name, value in given.items()}
        for name in ("x", "validation_data"):
            _load_as(given.get(name), loading)
        return getattr(self, method.new)(**given)

    call.__name__ = method.old
    return call


def _with_loading(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        loading = {name: kwargs.pop(name) for name in LOADING if name in kwargs}
        if loading:
            name = next(iter(loading))
            announce(f"{name}= of model.{plain.__name__}", f"{name}= of a keras.utils.PyDataset")
            for data in (*args[:1], kwargs.get("x"), kwargs.get("validation_data")):
                _load_as(data, loading)
        return plain(self, *args, **kwargs)

    return call


def _load_as(data: Any, loading: dict[str, Any]) -> None:
    """Have a data set loaded by as many workers as were asked for, where that is safe."""
    import keras

    # Several workers draw random numbers in any order, and processes must all draw alike.
    if isinstance(data, keras.utils.PyDataset) and current_world() is None:
        for name, value in loading.items():
            setattr(data, name, value)


def _renamed(old: str, owner: str) -> Callable[..., Any]:
    method = _METHODS[old]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        announce(owner + old, method.write)
        return getattr(self, method.new)(*args, **kwargs)

    call.__name__ = old
    return call


def _predict_classes(self: Any, x: Any, batch_size: int | None = None, verbose: int = 0) -> Any:
    announce("model.predict_classes", "model.predict(x).argmax(axis=-1)")
    found = self.predict(x, batch_size=batch_size, verbose=verbose)
    return found.argmax(axis=-1) if found.shape[-1] > 1 else (found > 0.5).astype("int32")


def _reset_layers(self: Any) -> None:
    announce("model.reset_states", "layer.reset_state() for each stateful layer")
    for layer in self.layers:
        if getattr(layer, "stateful", False) and hasattr(layer, "reset_state"):
            layer.reset_state()
