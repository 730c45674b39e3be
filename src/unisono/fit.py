"""The only wrapper around the calls of a parallel model. Around a `fit` it does, in this order:

1. announce the replicas, at the model's first `fit`;
2. observe its steps: for preemption, for callbacks that ask for it, for telemetry;
3. in a run of several processes, agree with the others: random states, the callbacks of each rank,
   when to begin and to stop;
4. call the trainer: what the backend bound to the model, or Keras' own method;
5. after a `fit` in a run, take over the chief's values.

`evaluate`, `predict` and the calls on one batch begin at 3. `save`, `save_weights` and `export`
write a file completely or not at all, and in a run in the chief only.
"""

import contextlib
import functools
import inspect
import os
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import keras

from unisono.backends import Framework, ReplicatedModel
from unisono.checkpoint.saving import (
    SAVES,
    protect_backups,
    protect_functions,
    restore_functions,
    safely,
    write_as_chief,
)
from unisono.data.arrays import serving
from unisono.data.feed import Feed
from unisono.data.shards import nearest_divisible
from unisono.devices import Placement
from unisono.devices.cpu_layers import chosen_cpu_layers
from unisono.hooks import bind, original, unbind
from unisono.keras_internals import INITIAL_EPOCH, can_convert_arrays, is_default
from unisono.launch.client import current_world
from unisono.launch.preemption_signal import is_handling_signals
from unisono.log import logger
from unisono.monitor.events import runs_folder
from unisono.replication.callback_ranks import (
    ChiefModel,
    acting_alone,
    for_rank,
    is_alone,
    is_chief_only,
)
from unisono.replication.preemption import Preemption
from unisono.replication.random_state import random_state, set_random_state
from unisono.telemetry import Telemetry

_CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
every_fit: "list[Callable[[], StepObserver]]" = []
"""Makers of observers for each `fit` of this process: those of `unisono verify`."""
_AT_BATCHES = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def bind_calls(model: keras.Model, replicated: ReplicatedModel, framework: Framework) -> None:
    """Bind the calls above to a model that a backend has made parallel."""
    calls = ModelCalls(model, replicated, framework)
    # Where all replicas are in this process the other calls are Keras' or the backend's own.
    for name in _CALLS if replicated.feed is not None else ("fit",):
        method = vars(model).get(name) or functools.partial(_call_class, model, name)
        run = calls.fit if name == "fit" else functools.partial(calls.call, name)
        bind(model, name, _as_method(functools.partial(run, method), model, name))
    for name in filter(functools.partial(hasattr, type(model)), SAVES):
        bind(model, name, _as_method(functools.partial(calls.save, name), model, name))
    protect_functions(model, calls.save_by)


def unbind_calls(model: keras.Model) -> None:
    """Give a model the calls of its class back."""
    unbind(model, *_CALLS, *SAVES)
    restore_functions(model)


class ModelCalls:
    """The calls of one parallel model."""

    def __init__(
        self, model: keras.Model, replicated: ReplicatedModel, framework: Framework
    ) -> None:
        self._model = model
        self._placement = replicated.placement
        self._framework = framework
        self._feed = replicated.feed
        self._settle = replicated.settle
        self._chief_model = ChiefModel(model)
        self._is_announced = False

    def fit(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_alone():
            return self._in_chief_alone("fit", args, kwargs)
        call = Call(self._model, "fit", method, args, kwargs)
        self._announce_once(call)
        with self._observed(call):
            return self._together(call)

    def call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_alone():
            return self._in_chief_alone(name, args, kwargs)
        return self._together(Call(self._model, name, method, args, kwargs))

    def save(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self.save_by(name, original(self._model, name), *args, **kwargs)

    def save_by(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        save = safely(self._model, name, method)
        if self._feed is None:
            return save(*args, **kwargs)
        path = args[0] if args else kwargs.get("filepath")
        world = self._feed.world
        return write_as_chief(world, f"{name} {path}", lambda: save(*args, **kwargs))

    def _in_chief_alone(self, name: str, args: Any, kwargs: Any) -> Any:
        """A call of a callback that runs in the chief only: the others do not take part."""
        return self._chief_model.call(name, original(self._model, name), args, kwargs)

    # -- 1. the announcement -------------------------------------------------------------------

    def _announce_once(self, call: "Call") -> None:
        world = current_world()
        if self._is_announced or not (world is None or world.is_chief):
            return
        self._is_announced = True
        global_batch = call.global_batch()
        logger.info(_announcement(self._framework, self._placement, global_batch))
        _warn_of_batch(self._framework, self._placement, global_batch)

    # -- 2. observing steps --------------------------------------------------------------------

    @contextlib.contextmanager
    def _observed(self, call: "Call") -> Iterator[None]:
        given = call.get("callbacks")
        if isinstance(given, keras.callbacks.CallbackList):
            protect_backups(given.callbacks)
            yield
            return
        callbacks = keras.tree.flatten(given) if given else []
        protect_backups(callbacks)
        observers = self._observers(callbacks, call)
        if not observers:
            yield
            return
        observed = ObservedSteps(observers)
        call.set("callbacks", [*callbacks, observed])
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            observed.restore()  # An interrupted training does not call `on_train_end`.
            for observer in observers:
                observer.end(error)
            error = None  # It holds this frame.

    def _observers(self, callbacks: list[Any], call: "Call") -> list["StepObserver"]:
        found = [make() for make in every_fit]
        if is_handling_signals() or any(hasattr(callback, "on_preempt") for callback in callbacks):
            found.append(Preemption(callbacks))
        # Programs have attributes of that name too, which are no observers.
        steps = (getattr(callback, "steps", None) for callback in callbacks)
        found += [each for each in steps if isinstance(each, StepObserver)]
        if (folder := runs_folder(os.environ)) is not None:
            found.append(Telemetry(folder, call.global_batch(), self._placement))
        return found

    # -- 3. agreeing with the other processes --------------------------------------------------

    def _together(self, call: "Call") -> Any:
        feed = self._feed
        if feed is None:
            return call()
        is_outermost = not feed.is_calling
        with feed.calling(call.name), serving(feed):
            if is_outermost:
                self._chief_model.forget()
                _agree_on_randomness(feed)
            callbacks = self._adapt(feed, call)
            with acting_alone(list(filter(is_chief_only, callbacks))):
                result = call()
        if call.name == "fit" and is_outermost:
            self._settle("end of fit")
        return result

    def _adapt(self, feed: Feed, call: "Call") -> list[Any]:
        """Give a call the arguments of this process; returns the callbacks that run here."""
        if call.name not in ("fit", "evaluate", "predict"):
            return []
        if not feed.world.is_chief:
            call.set("verbose", 0)
        given = call.get("callbacks")
        if not isinstance(given, keras.callbacks.CallbackList):
            every = keras.tree.flatten(given) if given else []
            callbacks = for_rank(every, feed.world)
            follow = [self._follow(feed, every)] if call.name == "fit" else []
            call.set("callbacks", [*callbacks, *follow])
            return callbacks
        if call.name != "fit":
            return []  # Keras passes on those of `fit` to its validation.
        every, given.callbacks = given.callbacks, for_rank(given.callbacks, feed.world)
        if not any(isinstance(callback, FollowChief) for callback in given.callbacks):
            follow_chief = self._follow(feed, every)
            follow_chief.set_model(self._model)
            given.append(follow_chief)
        return list(given.callbacks)

    def _follow(self, feed: Feed, callbacks: list[Any]) -> "FollowChief":
        # A callback at each batch makes Keras wait for each step, so there is one only beside
        # others that act at batches: in the chief, whose wish to stop counts.
        methods = [getattr(callback, name) for callback in callbacks for name in _AT_BATCHES]
        at_batches = not all(map(is_default, methods))
        at_batches = feed.world.broadcast(f"{feed.where()}: callbacks", at_batches)
        return (FollowChiefAtBatches if at_batches else FollowChief)(feed)


class Call:
    """A call of the trainer, with its arguments by name wherever they stand."""

    def __init__(
        self, model: keras.Model, name: str, method: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        self.name = name
        self._method = method
        self._args = list(args)
        self._kwargs = dict(kwargs)
        self._names = _positional(getattr(type(model), name))
        if not self._names:  # A user's `fit(self, *args, **kwargs)`.
            self._names = _positional(getattr(keras.Model, name))

    def __call__(self) -> Any:
        return self._method(*self._args, **self._kwargs)

    def get(self, name: str) -> Any:
        """An argument; None where it was not given."""
        given = dict(zip(self._names, self._args, strict=False))
        return given.get(name, self._kwargs.get(name))

    def set(self, name: str, value: Any) -> None:
        """Replace an argument, or add it."""
        if name in self._names[: len(self._args)]:
            self._args[self._names.index(name)] = value
        else:
            self._kwargs[name] = value

    def global_batch(self) -> int | None:
        """The global batch that `fit` will use, or None where only the data knows."""
        x, batch_size = self.get("x"), self.get("batch_size")
        leaves = [leaf for leaf in _leaves(x) if not isinstance(leaf, str)]
        if not leaves or not can_convert_arrays(x):
            spec = getattr(x, "element_spec", None)
            shapes = [leaf.shape for leaf in _leaves(spec) if getattr(leaf, "shape", None)]
            found = shapes[0][0] if shapes else getattr(x, "batch_size", None)
            return found if isinstance(found, int) else None
        num_samples = next((leaf.shape[0] for leaf in leaves if len(leaf.shape)), None)
        if num_samples is None:
            return None
        if not batch_size:
            num_steps = self.get("steps_per_epoch")
            batch_size = -(-num_samples // num_steps) if num_steps else 32
        return int(min(batch_size, num_samples))


@runtime_checkable
class StepObserver(Protocol):
    """Is called around each step of a `fit`; callbacks may have one as their attribute `steps`."""

    def begin(self, model: Any) -> None:
        """Training begins."""

    def before(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A step, or an execution of several, is about to run; returns its arguments."""

    def after(self, result: Any) -> None:
        """It was run, or is in flight on the device."""

    def end(self, error: BaseException | None) -> None:
        """Training has ended, with what stopped it."""


class ObservedSteps(keras.callbacks.Callback):
    """Wraps the train function while `fit` runs.

    A callback at each batch would do as well, but makes Keras wait for each step.
    """

    def __init__(self, observers: list[StepObserver]) -> None:
        super().__init__()
        self._observers = observers
        self._plain: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        for observer in self._observers:
            observer.begin(self.model)
        plain = self._plain = self.model.train_function

        def train_function(*args: Any) -> Any:
            for observer in self._observers:
                args = observer.before(args)
            result = plain(*args)
            for observer in self._observers:
                observer.after(result)
            return result

        self.model.train_function = train_function

    def on_train_end(self, logs: Any = None) -> None:
        self.restore()

    def restore(self) -> None:
        """Give the model its own function back."""
        if self._plain is not None:
            self.model.train_function, self._plain = self._plain, None


class FollowChief(keras.callbacks.Callback):
    """Begin, go on and stop training as the chief does."""

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed

    def on_train_begin(self, logs: Any = None) -> None:
        # A backup may have been found in one place only.
        first = self._feed.world.broadcast("fit, first epoch", getattr(self.model, INITIAL_EPOCH))
        setattr(self.model, INITIAL_EPOCH, first)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._stop_together(f"end of epoch {epoch + 1}")

    def _stop_together(self, when: str) -> None:
        stop = self._feed.world.broadcast(f"{self._feed.where()}, {when}", self.model.stop_training)
        self.model.stop_training = stop


class FollowChiefAtBatches(FollowChief):
    """Also stop in the middle of an epoch as the chief does."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._stop_together(f"after batch {batch + 1}")


def _agree_on_randomness(feed: Feed) -> None:
    """Shuffle alike everywhere: if random states differ, all take over the chief's."""
    state, topic = random_state(), f"{feed.where()}: random state"
    if len(set(feed.world.all_gather(topic, zlib.crc32(repr(state).encode())))) > 1:
        set_random_state(feed.world.broadcast(topic, state))


def _announcement(framework: Framework, placement: Placement, global_batch: int | None) -> str:
    count = placement.num_replicas
    noun = "replica" if count == 1 else "replicas"
    line = f"{framework.name}, {count} {noun} on {placement}; global batch "
    if global_batch is None:
        line += f"as the data yields it, 1/{count} of it per replica"
    elif global_batch % count == 0:
        line += f"{global_batch} = {count} x {global_batch // count} per replica"
    else:
        line += f"{global_batch}, about {global_batch / count:.1f} per replica"
    layers = chosen_cpu_layers(placement, framework.cpu_layers)
    return line + (f"; cheaper CPU layers: {', '.join(sorted(layers))}" if layers else "")


def _warn_of_batch(framework: Framework, placement: Placement, global_batch: int | None) -> None:
    count = placement.num_replicas
    if global_batch is None or global_batch % count == 0:
        return
    better = nearest_divisible(global_batch, count)
    if global_batch < count:
        warnings.warn(
            f"A global batch of {global_batch} is smaller than the {count} replicas, so replicas "
            f"idle. Use a batch_size of {better} or more, or fewer replicas.",
            stacklevel=5,
        )
    elif framework.needs_even_batches:
        warnings.warn(
            f"A global batch of {global_batch} does not divide by {count} replicas; on "
            f"{framework.title} every replica then computes all of it, which is exact but no "
            f"faster. Use batch_size={better}.",
            stacklevel=5,
        )


def _positional(method: Callable[..., Any]) -> list[str]:
    """The names of a method's positional parameters after `self`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(method).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in kinds][1:]


def _as_method(call: Callable[..., Any], model: keras.Model, name: str) -> Callable[..., Any]:
    """A call with the name, documentation and signature of the method that it replaces."""
    return functools.update_wrapper(call, original(model, name))


def _call_class(model: keras.Model, name: str, *args: Any, **kwargs: Any) -> Any:
    return original(model, name)(*args, **kwargs)


def _leaves(structure: Any) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(structure) if leaf is not None]
