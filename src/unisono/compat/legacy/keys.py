"""Keys of histories and logs: `acc` beside `accuracy`, and who is told of it.

Callbacks of the program are handed logs that know their old keys, those of Keras plain ones.
"""

import functools
from collections.abc import Callable
from typing import Any

from unisono.compat.knowledge import KEYS
from unisono.compat.legacy.lines import announce, is_asked_by_program, is_from_library

_WITH_LOGS = (
    *("on_epoch_end", "on_batch_end", "on_train_batch_end", "on_test_batch_end"),
    *("on_train_end", "on_test_end"),
)


class OldKeys(dict[str, Any]):
    """A history or logs that say what the keys which a program reads are called today."""

    name = "history"

    def __getitem__(self, key: str) -> Any:
        self._tell_of(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._tell_of(key)
        return super().get(key, default)

    def _tell_of(self, key: str) -> None:
        if key in KEYS and KEYS[key] in self and is_asked_by_program():
            announce(f'{self.name}["{key}"]', f'{self.name}["{KEYS[key]}"]')

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # Programs keep histories in files.


class OldLogs(OldKeys):
    """What callbacks are given."""

    name = "logs"


def patch(keras: Any) -> None:
    callbacks = keras.callbacks
    for name in ("EarlyStopping", "ModelCheckpoint", "ReduceLROnPlateau"):
        _watch_old_keys(getattr(callbacks, name))
    for name in _WITH_LOGS:
        _change_logs(callbacks.CallbackList, name, with_old_keys)
        # A progress bar shows each metric once.
        _change_logs(callbacks.ProgbarLogger, name, _without_old_keys)
    plain_list = callbacks.CallbackList.__init__

    @functools.wraps(plain_list)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_list(self, *args, **kwargs)
        for callback in self.callbacks:
            _tell_of_old_logs(callback)

    callbacks.CallbackList.__init__ = __init__
    begin = callbacks.History.on_train_begin

    def on_train_begin(self: Any, logs: Any = None) -> None:
        begin(self, logs)
        self.history = OldKeys(self.history)

    callbacks.History.on_train_begin = on_train_begin


def with_old_keys(logs: Any) -> Any:
    """Logs with the keys of Keras 2 beside today's."""
    if not logs:
        return logs
    old = {key: logs[new] for key, new in KEYS.items() if new in logs and key not in logs}
    return {**logs, **old}


def _tell_of_old_logs(callback: Any) -> None:
    """Give a callback of the program logs that speak up; Keras hands it plain ones."""
    plain = callback.on_epoch_end
    if is_from_library(plain) or isinstance(vars(callback).get("on_epoch_end"), _EpochEnd):
        return
    callback.on_epoch_end = _EpochEnd(plain)


class _EpochEnd:
    """A callback's own `on_epoch_end`, with logs that know their old keys."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        self._plain = plain

    def __call__(self, epoch: int, logs: Any = None) -> Any:
        return self._plain(epoch, logs if logs is None else OldLogs(logs))


def _watch_old_keys(callback: Any) -> None:
    """Let a callback watch "val_acc", of which Keras 3 does not know that more is better."""
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
