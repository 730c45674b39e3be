"""Training as Keras 2 spelled it: generators, losses, optimizers, and keys such as `acc`.

Callbacks of the program get logs that also know their old keys; callbacks of Keras get plain ones.
"""

import ast
import functools
import inspect
from collections.abc import Callable
from typing import Any

from unisono.compat.knowledge import DECAY, KEYS, LOADING, METHODS, RATE, Method
from unisono.compat.legacy import files
from unisono.compat.legacy.lines import announce, is_asked_by_program, is_from_library, where
from unisono.errors import LegacyError
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
    _patch_optimizers(keras)
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
    _patch_logs(keras)
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
    """Load a dataset with the requested number of workers, if that is safe."""
    import keras

    # Several workers draw random numbers in any order; all processes must draw the same.
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


def _patch_optimizers(keras: Any) -> None:
    optimizer = keras.optimizers.Optimizer
    if "lr" in vars(optimizer):
        return
    _accept_old_arguments(keras, optimizer)
    rate: Any = inspect.getattr_static(optimizer, "learning_rate")

    def set_rate(self: Any, value: Any) -> None:
        try:
            rate.fset(self, value)
        except TypeError as error:
            raise LegacyError(
                f"{where()} sets the learning rate of an optimizer made with decay=, which "
                "can't be translated: Keras 3 has a schedule or a rate that can be set, not both. "
                "Leave decay= out, and let the callback or the function that sets the rate divide "
                "by (1 + decay * step)."
            ) from error

    def old_get(self: Any) -> Any:
        announce("optimizer.lr", "optimizer.learning_rate")
        return self.learning_rate

    def old_set(self: Any, value: Any) -> None:
        announce("optimizer.lr", "optimizer.learning_rate")
        self.learning_rate = value

    optimizer.learning_rate = property(rate.fget, set_rate)
    optimizer.lr = property(old_get, old_set)


def get_value(variable: Any) -> Any:
    """`keras.backend.get_value`: a variable's value as a NumPy array or number."""
    import keras

    value = keras.ops.convert_to_numpy(variable)
    return value if value.ndim else value[()]


def set_value(variable: Any, value: Any) -> None:
    """`keras.backend.set_value`: assign to a variable."""
    if not hasattr(variable, "assign"):
        raise LegacyError(
            f"{where()} sets a value that is not a variable, which can't be translated: the "
            "learning rate of an optimizer with a schedule or decay= is computed in each step. "
            "Give the optimizer a plain learning_rate to set it."
        )
    variable.assign(value)


def _accept_old_arguments(keras: Any, optimizer: Any) -> None:
    plain = optimizer.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if "lr" in kwargs:
            announce("lr=", f"{RATE.write}=")
            kwargs["learning_rate"] = float(kwargs.pop("lr"))
        decay = kwargs.pop("decay", None)
        if decay:
            kwargs["learning_rate"] = _decayed(keras, kwargs.get("learning_rate"), decay)
        plain(self, *args, **kwargs)

    optimizer.__init__ = __init__


def _decayed(keras: Any, rate: Any, decay: Any) -> Any:
    if not isinstance(rate, (int, float)):
        raise LegacyError(
            f"{where()} gives an optimizer decay={decay} and a learning rate that is not a number, "
            "which can't be translated: Keras 3 takes one schedule. Put the decay into it."
        )
    announce("decay=", DECAY.write)
    return keras.optimizers.schedules.InverseTimeDecay(
        float(rate), decay_steps=1, decay_rate=float(decay)
    )


_WITH_LOGS = (
    *("on_epoch_end", "on_batch_end", "on_train_batch_end", "on_test_batch_end"),
    *("on_train_end", "on_test_end"),
)


class OldKeys(dict[str, Any]):
    """A history or logs that announce the new name of an old key when a program reads it."""

    name = "history"

    def __getitem__(self, key: str) -> Any:
        self._announce_key(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._announce_key(key)
        return super().get(key, default)

    def _announce_key(self, key: str) -> None:
        if key in KEYS and KEYS[key] in self and is_asked_by_program():
            announce(f'{self.name}["{key}"]', f'{self.name}["{KEYS[key]}"]')

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # Programs pickle histories.


class OldLogs(OldKeys):
    """The logs of callbacks."""

    name = "logs"


def _patch_logs(keras: Any) -> None:
    callbacks = keras.callbacks
    for name in ("EarlyStopping", "ModelCheckpoint", "ReduceLROnPlateau"):
        _watch_old_keys(getattr(callbacks, name))
    for name in _WITH_LOGS:
        _change_logs(callbacks.CallbackList, name, with_old_keys)
        # The progress bar shows each metric once.
        _change_logs(callbacks.ProgbarLogger, name, _without_old_keys)
    plain_list = callbacks.CallbackList.__init__

    @functools.wraps(plain_list)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_list(self, *args, **kwargs)
        for callback in self.callbacks:
            _give_old_logs(callback)

    callbacks.CallbackList.__init__ = __init__
    begin = callbacks.History.on_train_begin

    def on_train_begin(self: Any, logs: Any = None) -> None:
        begin(self, logs)
        self.history = OldKeys(self.history)

    callbacks.History.on_train_begin = on_train_begin


def with_old_keys(logs: Any) -> Any:
    """Logs with the keys of Keras 2 in addition."""
    if not logs:
        return logs
    old = {key: logs[new] for key, new in KEYS.items() if new in logs and key not in logs}
    return {**logs, **old}


def _give_old_logs(callback: Any) -> None:
    """Make a callback of the program get `OldLogs`."""
    plain = callback.on_epoch_end
    if is_from_library(plain) or isinstance(vars(callback).get("on_epoch_end"), _EpochEnd):
        return
    callback.on_epoch_end = _EpochEnd(plain)


class _EpochEnd:
    """A callback's `on_epoch_end`, with `OldLogs`."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        self._plain = plain

    def __call__(self, epoch: int, logs: Any = None) -> Any:
        return self._plain(epoch, logs if logs is None else OldLogs(logs))


def _watch_old_keys(callback: Any) -> None:
    """Let a callback monitor "val_acc", which Keras 3 does not know to be maximized."""
    plain = callback.__init__

    @functools.wraps(plain)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        for key in KEYS:
            if f"{{{key}" in str(getattr(self, "filepath", "")):
                announce(f'"{{{key}}}" in filepath', f'"{{{KEYS[key]}}}"')
        if self.monitor in KEYS:
            announce(f'monitor="{self.monitor}"', f'monitor="{KEYS[self.monitor]}"')
            self.mode = "max" if self.mode == "auto" else self.mode

    callback.__init__ = __init__


def _without_old_keys(logs: Any) -> Any:
    old = {key for key, new in KEYS.items() if logs and key in logs and new in logs}
    return {key: value for key, value in logs.items() if key not in old} if old else logs


def _change_logs(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def call(self: Any, *args: Any, logs: Any = None) -> Any:
        # The logs are the last parameter: after the epoch or the batch, if there is one.
        has_number = not name.endswith(("train_end", "test_end"))
        if len(args) > has_number:
            *args, logs = args  # type: ignore[assignment]
        return plain(self, *args, change(logs))

    setattr(owner, name, call)
