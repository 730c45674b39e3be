"""`lr=`, `decay=` and `optimizer.lr` on Keras 3's optimizers.

`decay=` becomes Keras' own schedule `InverseTimeDecay`, so files that a program saves are plain
ones. Its price is that of any schedule: the learning rate cannot be set by hand as well.
"""

import inspect
from typing import Any

from unisono.compat.knowledge import DECAY, RATE
from unisono.compat.legacy.lines import announce, where
from unisono.errors import LegacyError


def patch(keras: Any) -> None:
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
            f"{where()} sets a value that is no variable, which can't be translated: the learning "
            "rate of an optimizer with a schedule or decay= is computed in each step. Give the "
            "optimizer a plain learning_rate to set it."
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
            f"{where()} gives an optimizer decay={decay} and a learning rate that is no number, "
            "which can't be translated: Keras 3 takes one schedule. Put the decay into it."
        )
    announce("decay=", DECAY.write)
    return keras.optimizers.schedules.InverseTimeDecay(
        float(rate), decay_steps=1, decay_rate=float(decay)
    )
