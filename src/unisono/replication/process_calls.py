"""Keras' calls on a model that trains in several processes, made alike in all of them.

Every process runs the same `fit`, with the callbacks that are for it. The chief speaks: it alone
shows a progress bar and writes files, and where the processes' random states or wishes to stop
differ, all take over the chief's.
"""

import base64
import inspect
import random
import zlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from unisono.checkpoint.chief_files import write_as_chief
from unisono.checkpoint.saving import SAVES, safely
from unisono.data.arrays import serving, unshared
from unisono.data.feed import Feed, Shard
from unisono.hooks import bind, original, unbind
from unisono.replication.callback_ranks import (
    ChiefModel,
    acting_alone,
    for_rank,
    is_alone,
    is_chief_only,
)

_CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


class WorldCalls:
    """Hooks on the calls of one model.

    `settle(when)` makes all processes take over the chief's values; no step follows a `fit` to do
    it.
    """

    def __init__(self, model: keras.Model, feed: Feed, settle: Callable[[str], None]) -> None:
        self._model = model
        self._feed = feed
        self._settle = settle
        self._world = feed.world
        self._chief_model = ChiefModel(model)
        for name in _CALLS:
            bind(model, name, self._call(name))
        for name in SAVES:
            bind(model, name, self._save(name))

    def release(self) -> None:
        unbind(self._model, *_CALLS, *SAVES)

    def build(self, plain: Callable[..., Any], iterator: Any = None, data_batch: Any = None) -> Any:
        """Keras' symbolic build, given plain data."""
        data_batch = data_batch.data if isinstance(data_batch, Shard) else data_batch
        return plain(None if iterator is None else unshared(iterator), data_batch)

    def _call(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            method = original(self._model, name)
            if is_alone():
                return self._chief_model.call(name, method, args, kwargs)
            is_outermost = not self._feed.is_calling
            with self._feed.calling(name), serving(self._feed):
                if is_outermost:
                    self._chief_model.forget()
                    self._agree_on_randomness()
                args, kwargs, alone = self._adapted(name, method, args, kwargs)
                with acting_alone(alone):
                    result = method(*args, **kwargs)
            if name == "fit" and is_outermost:
                self._settle("end of fit")
            return result

        return call

    def _save(self, name: str) -> Callable[..., Any]:
        def save(*args: Any, **kwargs: Any) -> Any:
            method = safely(self._model, name)
            path = args[0] if args else kwargs.get("filepath")
            return write_as_chief(self._world, f"{name} {path}", lambda: method(*args, **kwargs))

        return save

    def _adapted(
        self, name: str, method: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Any, Any, list[Any]]:
        """The arguments of a call for this process, and the callbacks that it alone runs."""
        given = _arguments(method, args, kwargs)
        changes = {}
        callbacks: list[Any] = []
        if name in ("fit", "evaluate", "predict"):
            if not self._world.is_chief:
                changes["verbose"] = 0
            found = given.get("callbacks")
            # Keras passes on those of fit to its validation.
            if name == "fit" or not isinstance(found, keras.callbacks.CallbackList):
                callbacks, changes["callbacks"] = self._callbacks(name, found)
        names = list(inspect.signature(method).parameters)
        for position, key in enumerate(names[: len(args)]):
            if key in changes:
                args = (*args[:position], changes.pop(key), *args[position + 1 :])
        return args, {**kwargs, **changes}, list(filter(is_chief_only, callbacks))

    def _callbacks(self, name: str, given: Any) -> tuple[list[Any], Any]:
        """The callbacks of this process, and the same as an argument of a call."""
        if isinstance(given, keras.callbacks.CallbackList):
            every = given.callbacks
            given.callbacks = for_rank(every, self._world)
            if not any(isinstance(callback, FollowChief) for callback in given.callbacks):
                follow = self._follow(every)
                follow.set_model(self._model)
                given.append(follow)
            return given.callbacks, given
        every = keras.tree.flatten(given) if given else []
        callbacks = for_rank(every, self._world)
        return callbacks, [*callbacks, self._follow(every)] if name == "fit" else callbacks

    def _follow(self, callbacks: list[Any]) -> "FollowChief":
        # A callback at each batch keeps Keras from running ahead of the device, so one of ours is
        # there only beside others that do as well: in the chief, whose wish to stop counts.
        at_batches = any(map(_acts_at_batches, callbacks))
        at_batches = self._world.broadcast(f"{self._feed.where()}: callbacks", at_batches)
        return (FollowChiefAtBatches if at_batches else FollowChief)(self._feed)

    def _agree_on_randomness(self) -> None:
        """Shuffle alike everywhere: if random states differ, all take over the chief's."""
        state = _random_state()
        digest = zlib.crc32(repr(state).encode())
        digests = self._world.all_gather(f"{self._feed.where()}: random state", digest)
        if len(set(digests)) > 1:
            _set_random_state(self._world.broadcast(f"{self._feed.where()}: random state", state))


class FollowChief(keras.callbacks.Callback):
    """Begin, go on and stop training as the chief does."""

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed

    def on_train_begin(self, logs: Any = None) -> None:
        # A backup may have been found in one place only.
        first = self._feed.world.broadcast("fit, first epoch", self.model._initial_epoch)
        self.model._initial_epoch = first

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._stop_together(f"end of epoch {epoch + 1}")

    def _stop_together(self, when: str) -> None:
        stop = self._feed.world.broadcast(f"{self._feed.where()}, {when}", self.model.stop_training)
        self.model.stop_training = stop


class FollowChiefAtBatches(FollowChief):
    """Also stop in the middle of an epoch as the chief does."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._stop_together(f"after batch {batch + 1}")


def _acts_at_batches(callback: Any) -> bool:
    return not all(
        keras.src.utils.is_default(getattr(callback, name))
        for name in ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
    )


def _arguments(method: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(method).bind_partial(*args, **kwargs)
    return {**bound.arguments, **bound.arguments.get("kwargs", {})}


def _random_state() -> dict[str, Any]:
    """What Keras' shuffles draw from, as plain data."""
    name, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {"numpy": [name, np.asarray(keys).tolist(), *rest]}
    version, numbers, gauss = random.getstate()
    state["python"] = [version, list(numbers), gauss]
    if keras.backend.backend() == "tensorflow":
        from tensorflow.python.eager.context import global_seed

        state["tensorflow"] = global_seed()
    if keras.backend.backend() == "torch":
        import torch

        state["torch"] = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, "uint32"), *rest))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if state.get("tensorflow") is not None:
        import tensorflow as tf

        tf.random.set_seed(state["tensorflow"])
    if "torch" in state:
        import torch

        found = np.frombuffer(base64.b64decode(state["torch"]), "uint8")
        torch.set_rng_state(torch.from_numpy(found.copy()))
