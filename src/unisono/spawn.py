"""Run a function in one fresh process per replica of this machine."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono.devices import choose
from unisono.engines import load_engine
from unisono.parallel import count_gpus


def spawn(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    replicas: int | None = None,
    gpus: int | Sequence[int] | None = None,
) -> list[Any]:
    """Run `function(*args, **kwargs)` on every replica; returns what each returned.

    For own training loops on torch, where a replica is a process. It works from a script without
    a guard and from a notebook; the first replica's output is shown, an exception on any replica
    ends all of them and is raised here.

    >>> spawn(lambda: 1, replicas=0)
    Traceback (most recent call last):
    ...
    unisono.errors.DeviceError: Asked for replicas=0. Give a whole number of at least 1.
    """
    import keras

    engine = load_engine(keras.backend.backend())
    placement = choose(replicas=replicas, gpus=gpus, num_visible_gpus=count_gpus())
    return engine.spawn(function, args, kwargs or {}, placement)
