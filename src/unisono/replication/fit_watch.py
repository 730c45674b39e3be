"""Looks at the steps of a `fit` from outside: who makes room, and who publishes how it goes.

Keras' train function is wrapped while `fit` runs. A callback at each batch would do as well, but
keeps Keras from running ahead of the device.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import keras

_PLACE = 5  # Of `callbacks` among the arguments of `fit`.


class Watcher(Protocol):
    """One who looks at steps."""

    def begin(self, model: Any) -> None:
        """Training begins."""

    def before(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A step, or an execution of several, is about to run with these arguments."""

    def after(self, result: Any) -> None:
        """It was run, or is under way on the device."""

    def end(self, error: BaseException | None) -> None:
        """Training has ended, with what stopped it."""


@runtime_checkable
class LooksAtSteps(Protocol):
    """A callback that brings a watcher of its own."""

    steps: Watcher


def watched(
    fit: Callable[..., Any], watchers: Callable[[list[Any], dict[str, Any]], list[Watcher]]
) -> Callable[..., Any]:
    """A `fit` whose steps are looked at by `watchers(callbacks, arguments)`."""

    def watched_fit(*args: Any, **kwargs: Any) -> Any:
        is_by_place = len(args) > _PLACE
        given = args[_PLACE] if is_by_place else kwargs.get("callbacks")
        if isinstance(given, keras.callbacks.CallbackList):
            return fit(*args, **kwargs)
        callbacks = keras.tree.flatten(given) if given else []
        names = ("x", "y", "batch_size", "epochs")
        chosen = watchers(callbacks, {**dict(zip(names, args, strict=False)), **kwargs})
        if not chosen:
            return fit(*args, **kwargs)
        watch = FitWatch(chosen)
        callbacks = [*callbacks, watch]
        if is_by_place:
            args = (*args[:_PLACE], callbacks, *args[_PLACE + 1 :])
        else:
            kwargs["callbacks"] = callbacks
        error: BaseException | None = None
        try:
            return fit(*args, **kwargs)
        except BaseException as raised:
            error = raised
            raise
        finally:
            watch.restore()  # Keras does not say that training has ended when it is interrupted.
            for watcher in chosen:
                watcher.end(error)
            error = None  # It holds this frame.

    return watched_fit


class FitWatch(keras.callbacks.Callback):
    """Wraps the train function from the beginning of training to its end."""

    def __init__(self, watchers: list[Watcher]) -> None:
        super().__init__()
        self._watchers = watchers
        self._plain: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        for watcher in self._watchers:
            watcher.begin(self.model)
        plain = self._plain = self.model.train_function

        def train_function(*args: Any) -> Any:
            for watcher in self._watchers:
                args = watcher.before(args)
            result = plain(*args)
            for watcher in self._watchers:
                watcher.after(result)
            return result

        self.model.train_function = train_function

    def on_train_end(self, logs: Any = None) -> None:
        self.restore()

    def restore(self) -> None:
        """Give Keras its own function back."""
        if self._plain is not None:
            self.model.train_function, self._plain = self._plain, None
