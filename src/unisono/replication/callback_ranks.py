"""Which callbacks run in which processes of a run, and what the chief's callbacks may do alone.

Nobody can list the callbacks that write, upload or open a connection, but where a class comes from
says what it is for: a program's own callbacks and Keras' may steer the training, so they run in
every process; those of any other installed package mostly log or save, so they run in the chief,
whose changes to the model all processes take over anyway. `unisono.callbacks.every_rank` and
`chief_only` say otherwise for one callback.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from unisono.data.arrays import changing_arrays
from unisono.errors import StrategyError
from unisono.hooks import bind
from unisono.keras_internals import (
    SAVE_BACKUP,
    compiled_metrics,
    is_default,
    set_value,
    value_of,
)
from unisono.launch.client import World
from unisono.replication.framework import framework
from unisono.replication.random_state import random_state_kept

RANKS = "_unisono_ranks"
"""What a callback is marked with: "every" or "chief"."""

_callbacks = keras.callbacks
# Of Keras' own, those that write files or messages and do nothing to the model.
_ONLY_WRITE = tuple(
    getattr(_callbacks, name)
    for name in ("CSVLogger", "TensorBoard", "RemoteMonitor", "OrbaxCheckpoint")
    if hasattr(_callbacks, name)
)
# Packages whose callbacks know of the other processes.
_KNOWN_PACKAGES = {"keras", "unisono", "horovod"}
_FUNCTIONS = ("train_function", "test_function", "predict_function")
_thread = threading.local()


def is_chief_only(callback: Any) -> bool:
    """Whether a callback runs in the chief alone; the same answer in every process."""
    if (marked := vars(callback).get(RANKS)) is not None:
        return bool(marked == "chief")
    if isinstance(callback, _ONLY_WRITE):
        return not framework().is_saved_collectively(callback)
    kinds = [k for k in type(callback).__mro__ if issubclass(k, _callbacks.Callback)]
    return any(_is_installed(kind.__module__) for kind in kinds or [type(callback)])


def for_rank(callbacks: Sequence[Any], world: World) -> list[Any]:
    """The callbacks that run in this process."""
    for callback in callbacks:
        if RANKS in vars(callback):
            continue
        if isinstance(callback, _callbacks.BackupAndRestore) and not world.is_chief:
            # Loading is for all; what it saves and removes are the chief's files.
            bind(callback, SAVE_BACKUP, _nothing)
            bind(callback, "on_train_end", _nothing)
        elif framework().is_saved_collectively(callback):
            framework().save_collectively(callback)
    return [each for each in callbacks if world.is_chief or not is_chief_only(each)]


@contextlib.contextmanager
def acting_alone(callbacks: Sequence[Any]) -> Iterator[None]:
    """Let the chief know when a callback acts that the other processes do not have."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    for callback in callbacks:
        for name in [name for name in dir(callback) if name.startswith("on_")]:
            act = getattr(callback, name)
            if not callable(act) or is_default(act):
                continue
            before.append((vars(callback), name, vars(callback).get(name)))
            bind(callback, name, _alone(act))
    try:
        yield
    finally:
        for attributes, name, own in reversed(before):
            if own is None:
                attributes.pop(name, None)
            else:
                attributes[name] = own


def is_alone() -> bool:
    """Whether the chief does what no other process does."""
    return getattr(_thread, "is_alone", False)


class ChiefModel:
    """A model's calls in the chief alone: plain Keras on the chief's values, without a trace."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._functions: dict[str, Any] = {}
        self._compiled_for: Any = None

    def call(self, name: str, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if name in ("fit", "train_on_batch"):
            raise StrategyError(
                f"A callback that runs in rank 0 alone called {name}, which trains in all "
                "processes. Give it to fit as unisono.callbacks.every_rank(callback), or leave "
                "training out of it: it may call evaluate and predict."
            )
        with changing_arrays(lambda adapter: adapter), self._plain(), _unchanged(self._model):
            return method(*args, **kwargs)

    def forget(self) -> None:
        """Trace its steps anew: the model may have been changed."""
        self._functions = {}

    @contextlib.contextmanager
    def _plain(self) -> Iterator[None]:
        """Without the hooks of the replicas, and with compiled steps of its own."""
        model = self._model
        if self._compiled_for is not (compiled_for := compiled_metrics(model)):
            self._compiled_for = compiled_for
            self.forget()
        attributes = vars(model)
        hooks = {n: h for n, h in attributes.items() if getattr(h, "is_unisono_hook", False)}
        theirs = {name: getattr(model, name) for name in _FUNCTIONS}
        for name in hooks:
            del attributes[name]
        for name in _FUNCTIONS:
            setattr(model, name, self._functions.get(name))
        try:
            yield
        finally:
            self._functions = {name: getattr(model, name) for name in _FUNCTIONS}
            for name, function in theirs.items():
                setattr(model, name, function)
            attributes.update(hooks)


@contextlib.contextmanager
def _unchanged(model: Any) -> Iterator[None]:
    """Give back what evaluation writes: metrics and the states of layers."""
    trainable = {id(v) for v in model.trainable_variables}
    known = {id(v): v for v in [*model.variables, *model.metrics_variables]}
    if framework().donates_buffers:
        # Keras' compiled steps free the arrays that they are given.
        values = [(v, value_of(v)) for v in known.values()]
        for variable, value in values:
            set_value(variable, keras.ops.copy(value))
        try:
            yield
        finally:
            for variable, value in values:
                set_value(variable, value)
        return
    kept = [(v, _copied(v)) for v in known.values() if id(v) not in trainable]
    try:
        yield
    finally:
        for variable, value in kept:
            if not np.array_equal(_copied(variable), value):
                variable.assign(value)


def _copied(variable: Any) -> Any:
    return np.array(keras.ops.convert_to_numpy(variable))


def _alone(act: Callable[..., Any]) -> Callable[..., Any]:
    def alone(*args: Any, **kwargs: Any) -> Any:
        before = is_alone()
        _thread.is_alone = True
        try:
            with random_state_kept():
                return act(*args, **kwargs)
        finally:
            _thread.is_alone = before

    return alone


def _is_installed(module: str) -> bool:
    """Whether a module is of an installed package, and not of the program or of Keras."""
    package = module.partition(".")[0]
    if package in _KNOWN_PACKAGES or package in ("__main__", _package_of_program()):
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _package_of_program() -> str:
    """The package that `unisono run -m package.train` runs: it may well be installed."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name.partition(".")[0] if spec is not None else "__main__"


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The chief does it."""
