"""Learning rates for any number of replicas: step → rate, as schedules of Keras.

A step is one update by the optimizer, so a schedule means the same on every backend and whatever
the global batch. Schedules take a rate or another schedule, Keras' own too, so they compose. Called
with a plain number they return one, for printing, plotting and custom training loops.
"""

import math
from typing import Any

import keras
import numpy as np

from unisono.errors import ConfigurationError

SCALINGS = ("linear", "sqrt", "none")


class PolynomialDecay(keras.optimizers.schedules.LearningRateSchedule):
    """From `rate` to `end_rate` over `decay_steps` steps, and `end_rate` from there on.

    At a step it is `(rate - end_rate) * (1 - step / decay_steps) ** power + end_rate`.

    Args:
        rate: The learning rate at step 0.
        decay_steps: The number of steps after which it is `end_rate`.
        end_rate: The last learning rate.
        power: The power of the polynomial; 1 is a straight line.

    Raises:
        ConfigurationError: If a rate is negative, or there are no steps or no positive power.

    Example:
        >>> rate = PolynomialDecay(0.1, decay_steps=100)
        >>> rate(0), rate(50), rate(200)
        (0.1, 0.05, 0.0)
    """

    def __init__(
        self, rate: float, decay_steps: int, *, end_rate: float = 0.0, power: float = 1.0
    ) -> None:
        _check_rate("rate", rate)
        _check_rate("end_rate", end_rate)
        if decay_steps < 1 or power <= 0:
            raise ConfigurationError(
                f"Asked for decay_steps={decay_steps!r} and power={power!r}. Give at least one "
                "step and a power above 0."
            )
        self.rate = rate
        self.decay_steps = decay_steps
        self.end_rate = end_rate
        self.power = power

    def __call__(self, step: Any) -> Any:
        numbers, step = _numbers(step)
        left = 1.0 - numbers.minimum(step / self.decay_steps, 1.0)
        return _plain((self.rate - self.end_rate) * left**self.power + self.end_rate)

    def get_config(self) -> dict[str, Any]:
        return {
            "rate": self.rate,
            "decay_steps": self.decay_steps,
            "end_rate": self.end_rate,
            "power": self.power,
        }


class Scaled(keras.optimizers.schedules.LearningRateSchedule):
    """`factor` times a rate or a schedule.

    Args:
        schedule: A learning rate, or a schedule of unisono or Keras.
        factor: What it is multiplied with.

    Raises:
        ConfigurationError: If the factor or the rate is not a number of at least 0.

    Example:
        >>> Scaled(PolynomialDecay(0.1, decay_steps=100), 4)(0)
        0.4
    """

    def __init__(self, schedule: Any, factor: float) -> None:
        _check_rate("factor", factor)
        self.schedule = _schedule(schedule)
        self.factor = factor

    def __call__(self, step: Any) -> Any:
        return _value(self.schedule, step) * self.factor

    def get_config(self) -> dict[str, Any]:
        return {"schedule": _serialized(self.schedule), "factor": self.factor}


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """A rate or a schedule, approached along a straight line over the first `warmup_steps` steps.

    At step 0 it is `start_factor` times the schedule's own value, from `warmup_steps` on it is that
    value: training with a large global batch often diverges if it begins at its full rate.

    Args:
        schedule: A learning rate, or a schedule of unisono or Keras.
        warmup_steps: The number of steps; 0 for no warm-up.
        start_factor: The fraction of the schedule's value at step 0.

    Raises:
        ConfigurationError: If a number is negative.

    Example:
        >>> rate = WarmUp(0.4, warmup_steps=10, start_factor=0.25)
        >>> rate(0), rate(5), rate(10)
        (0.1, 0.25, 0.4)
    """

    def __init__(self, schedule: Any, warmup_steps: int, *, start_factor: float = 0.0) -> None:
        if warmup_steps < 0:
            raise ConfigurationError(f"Asked for warmup_steps={warmup_steps!r}. Give 0 or more.")
        _check_rate("start_factor", start_factor)
        self.schedule = _schedule(schedule)
        self.warmup_steps = warmup_steps
        self.start_factor = start_factor

    def __call__(self, step: Any) -> Any:
        value = _value(self.schedule, step)
        if not self.warmup_steps:
            return value
        numbers, step = _numbers(step)
        part = numbers.minimum(step / self.warmup_steps, 1.0)
        return _plain(value * (self.start_factor + (1.0 - self.start_factor) * part))

    def get_config(self) -> dict[str, Any]:
        return {
            "schedule": _serialized(self.schedule),
            "warmup_steps": self.warmup_steps,
            "start_factor": self.start_factor,
        }


def scaling_factor(num_replicas: int, scaling: str = "linear") -> float:
    """By how much to multiply the learning rate of one replica for `num_replicas`.

    Args:
        num_replicas: The number of replicas, with which the global batch grows.
        scaling: `"linear"`, the rule of Goyal et al. (2017); `"sqrt"`, which keeps the variance of
            an update; or `"none"`.

    Returns:
        The factor.

    Raises:
        ConfigurationError: If there is no replica, or no such scaling.

    Example:
        >>> scaling_factor(4), scaling_factor(4, "sqrt"), scaling_factor(4, "none")
        (4.0, 2.0, 1.0)
    """
    if num_replicas < 1:
        raise ConfigurationError(f"Asked for num_replicas={num_replicas!r}. Give at least 1.")
    if scaling not in SCALINGS:
        raise ConfigurationError(
            f"Asked for scaling={scaling!r}. Choose among {', '.join(SCALINGS)}."
        )
    return {"linear": float(num_replicas), "sqrt": math.sqrt(num_replicas), "none": 1.0}[scaling]


def for_replicas(
    schedule: Any, num_replicas: int, *, scaling: str = "linear", warmup_steps: int = 0
) -> Any:
    """Turn a schedule for one replica into one for many: scaled, after a gradual warm-up.

    The warm-up begins at the rate of one replica (Goyal et al. 2017, section 2.2), so there is none
    if nothing is scaled.

    Args:
        schedule: A learning rate, or a schedule of unisono or Keras.
        num_replicas: The number of replicas.
        scaling: See `scaling_factor`.
        warmup_steps: The number of steps until the scaled rate is reached.

    Returns:
        A schedule, for any optimizer of Keras.

    Raises:
        ConfigurationError: If a number is negative, or there is no such scaling.

    Example:
        >>> rate = for_replicas(0.1, 4, warmup_steps=10)
        >>> rate(0), rate(10)
        (0.1, 0.4)
    """
    factor = scaling_factor(num_replicas, scaling)
    return WarmUp(Scaled(schedule, factor), warmup_steps, start_factor=1 / factor)


def _schedule(schedule: Any) -> Any:
    """A schedule or a plain rate, as it was given or as it was saved."""
    if isinstance(schedule, dict):
        return keras.saving.deserialize_keras_object(schedule)
    if not callable(schedule):
        _check_rate("schedule", schedule)
    return schedule


def _serialized(schedule: Any) -> Any:
    return keras.saving.serialize_keras_object(schedule) if callable(schedule) else schedule


def _value(schedule: Any, step: Any) -> Any:
    value = schedule(step) if callable(schedule) else schedule
    if keras.ops.is_tensor(value) and _is_plain(step):  # A schedule of Keras itself.
        return _plain(keras.ops.convert_to_numpy(value))
    return value


def _numbers(step: Any) -> tuple[Any, Any]:
    """What computes with a step, and the step as that takes it."""
    if _is_plain(step):
        return np, np.asarray(step, "float64")
    return keras.ops, keras.ops.cast(step, keras.config.floatx())


def _is_plain(step: Any) -> bool:
    return isinstance(step, (int, float, np.ndarray, np.generic))


def _plain(value: Any) -> Any:
    """A number where it is one; arrays and tensors stay what they are."""
    is_number = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim)
    return float(value) if is_number else value


def _check_rate(name: str, value: object) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ConfigurationError(f"Asked for {name}={value!r}. Give a number of at least 0.")


for _kind in (PolynomialDecay, Scaled, WarmUp):
    keras.saving.register_keras_serializable(package="unisono")(_kind)

__all__ = ["PolynomialDecay", "Scaled", "WarmUp", "for_replicas", "scaling_factor"]
