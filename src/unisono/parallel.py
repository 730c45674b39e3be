"""The public calls on a model: make it parallel, compare its replicas, give it back.

`configure` limits what they may use of the machine. Keras is imported where a model is at hand.
"""

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unisono.backends import ReplicatedModel, load_backend, load_framework
from unisono.backends.missing_gpus import warn_of_missing_gpus
from unisono.backends.settings import apply_policy
from unisono.devices import (
    Placement,
    choose,
    choose_own,
    current_policy,
    describe,
    forced_replicas,
    simulated_gpus,
    warn_of_cores,
)
from unisono.errors import DisagreementError, ModelError, StrategyError
from unisono.hooks import unbind

if TYPE_CHECKING:
    import keras

FORCED_SYNC = "UNISONO_VERIFY_SYNC_BATCH_NORM"
"""Of `unisono verify`, set to 1: batch norm is synchronized, whatever a program asks for."""
_REPLICATED = "_unisono"
_DISTRIBUTED = "_unisono_horovod"  # What unisono.horovod, a package above, keeps on an optimizer.


def parallel(
    model: "keras.Model",
    *,
    replicas: int | None = None,
    gpus: int | Sequence[int] | None = None,
    sync_batch_norm: bool = True,
) -> "keras.Model":
    """Train a Keras model on several devices, in place.

    Without arguments every GPU is used, or one replica where there is none. In a run of several
    processes (`unisono run`) the model of each process is one replica. The batch given to `fit`
    stays the global batch, and the result is that of one device.

    Args:
        model: A Keras model, compiled or not.
        replicas: The number of replicas: that many GPUs, or CPU replicas on a machine without GPUs.
        gpus: The number of GPUs, or a list of their ids.
        sync_batch_norm: Whether batch normalization uses the statistics of the global batch, as on
            one device. With `False` each replica normalizes its own rows.

    Returns:
        The model itself.

    Raises:
        ModelError: If `model` is not a Keras model, or was compiled with
            `hvd.DistributedOptimizer`.
        ConfigurationError: If the devices do not exist, or the backend has already started with
            others.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model = parallel(model, replicas=2)
        >>> model.compile("sgd", "mse")
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=4, verbose=0)
        unisono: ... 2 replicas on cpu 0, 1; global batch 4 = 2 x 2 per replica
    """
    check_model(model)
    placement = place(replicas=replicas, gpus=gpus)
    return spread(model, placement, sync_batch_norm=sync_batch_norm)


def spread(
    model: "keras.Model", placement: Placement, *, sync_batch_norm: bool = True
) -> "keras.Model":
    """Train a model on devices that are chosen already: what `parallel` and its old names share."""
    from unisono.fit import bind_calls

    check_model(model)
    _check_optimizer(model)
    sync_batch_norm |= os.environ.get(FORCED_SYNC) == "1"
    backend = load_backend()
    before = replicated_model(model)
    if before is not None and (before.placement, before.sync_batch_norm) == (
        placement,
        sync_batch_norm,
    ):
        return model
    backend.prepare(placement)
    release(model)
    replicated = backend.replicate(model, placement, sync_batch_norm=sync_batch_norm)
    vars(model)[_REPLICATED] = replicated
    bind_calls(model, replicated, load_framework())
    return model


def place(*, replicas: int | None, gpus: int | Sequence[int] | None) -> Placement:
    """The devices that a request means: this machine's, or this process' own in a run of more."""
    from unisono.launch.client import current_world

    world = current_world()
    if world is None:
        placement = choose(replicas=replicas, gpus=gpus, num_visible_gpus=count_gpus())
        warn_of_cores(placement)
    else:
        placement = choose_own(
            world.topology, replicas=replicas, gpus=gpus, num_visible_gpus=count_gpus()
        )
    warn_of_missing_gpus(placement, load_framework())
    return placement


def place_on_cpus(count: int) -> Placement:
    """CPU replicas, also where there are GPUs."""
    if forced_replicas() is not None:
        return place(replicas=count, gpus=None)
    return Placement("cpu", tuple(range(count)))


def release(model: "keras.Model") -> "keras.Model":
    """Give a parallel model back to plain Keras on one device, with its present values.

    Args:
        model: A Keras model; one that is not parallel stays as it is.

    Returns:
        The model itself.

    Raises:
        ModelError: If `model` is not a Keras model.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model = parallel(model, replicas=2)
        >>> release(model) is model
        True
    """
    check_model(model, "release")
    replicated = replicated_model(model)
    if replicated is not None:
        from unisono.fit import unbind_calls

        replicated.release()
        unbind(model, _REPLICATED)
        unbind_calls(model)
    return model


def check_replicas(model: "keras.Model") -> str:
    """Compare every replica's copy of a model's weights and optimizer state, bit by bit.

    In a run of several processes all of them must call it.

    Args:
        model: A parallel model; in a run of several processes also the model of a custom training
            loop.

    Returns:
        The checksum that all replicas have in common: eight hexadecimal digits.

    Raises:
        DisagreementError: If replicas differ; the message names the first variable that does.
        ModelError: If the model has no replicas, or is not a Keras model.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model = parallel(model, replicas=2)
        >>> len(check_replicas(model))
        8
    """
    from unisono.launch.client import current_world

    check_model(model, "check_replicas")
    replicated = replicated_model(model)
    world = current_world()
    if replicated is not None:
        names, replicas = replicated.variable_names(), replicated.checksums()
    elif world is not None:
        # A model of a custom training loop: every process has a copy.
        from unisono.replication.checksums import names_of, own_checksums

        names, replicas = names_of(model), [own_checksums(model)]
    else:
        raise ModelError(
            "Asked to compare the replicas of a model that has none. Call unisono.parallel(model) "
            "first."
        )
    if world is not None:
        replicas = [one for own in world.all_gather("check_replicas", replicas) for one in own]
    for replica, found in enumerate(replicas[1:], start=1):
        pairs = zip(replicas[0], found, strict=False)
        differing = [i for i, (first, other) in enumerate(pairs) if first != other]
        if differing or len(found) != len(replicas[0]):
            where = names[differing[0]] if differing else "their number"
            raise DisagreementError(
                f"Replica {replica} differs from replica 0 in {len(differing)} of {len(names)} "
                f"variables, first in {where}. A value was changed on one replica only, outside "
                "of a training step; change it everywhere, or on the chief, before the next step."
            )
    return f"{zlib.crc32(repr(replicas[0]).encode()):08x}"


def configure(
    gpus: int | Sequence[int] | str | None = None,
    memory: str | float | None = None,
    cpu_threads: int | None = None,
    *,
    deterministic: bool | None = None,
) -> None:
    """Limit what this process uses of the machine; call it before the backend starts its devices.

    Later calls may add to what was set, and may not contradict it.

    Args:
        gpus: A number of GPUs, a list of ids, `"idle"` for all that no other process uses, or
            `"idle:2"` for the two of these with the most free memory. The others are hidden from
            every backend, and those left are counted from 0.
        memory: For each process, on each GPU: `"grow"`, `"all"`, an amount such as `"8GiB"` or a
            fraction such as 0.5.
        cpu_threads: The number of threads for computations on CPUs.
        deterministic: If True, GPUs compute the same bits in every run, in float32 without TF32, at
            the price of slower kernels.

    Raises:
        ConfigurationError: If a value makes no sense or contradicts an earlier call
            (`DeviceError`), or if the backend has already started its devices (`StartedError`).

    Example:
        >>> configure(memory="grow", cpu_threads=2)
    """
    before = current_policy()
    policy = before.joined_with(describe(gpus, memory, cpu_threads, deterministic))
    if policy != before:
        apply_policy(policy, before)


def is_parallel(model: Any) -> bool:
    """Whether a model trains on replicas."""
    return _REPLICATED in vars(model)


def replicated_model(model: Any) -> ReplicatedModel | None:
    """What a backend keeps for a model that trains on replicas."""
    replicated: ReplicatedModel | None = vars(model).get(_REPLICATED)
    return replicated


def count_gpus() -> int:
    """How many GPUs the chosen Keras backend sees here; simulated ones count."""
    # Counting real ones starts the devices, so only ask where the answer matters.
    return simulated_gpus() or load_backend().num_gpus()


def check_model(model: object, call: str = "parallel") -> None:
    """Raise ModelError for what is not a model of Keras, by the public call that was given it."""
    import keras

    if not isinstance(model, keras.Model):
        verb = {"parallel": "parallelize", "release": "release"}.get(
            call, "compare the replicas of"
        )
        raise ModelError(
            f"Asked to {verb} a {type(model).__name__}; unisono.{call} takes a "
            "keras.Model (Sequential, functional or subclassed). Pass the model itself."
        )


def check_call(verb: str, function: Any, args: Any, kwargs: Any) -> None:
    """Raise StrategyError for what cannot be called, before any process is asked to."""
    if not callable(function):
        raise StrategyError(
            f"Asked to {verb} {function!r}, which cannot be called. Pass a function, and its "
            "arguments as a tuple after it."
        )
    if not isinstance(args, Iterable) or isinstance(args, (str, bytes)):
        raise StrategyError(
            f"Asked to {verb} a function with args={args!r}. Give a tuple, such as args=(x,)."
        )
    is_named = isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)
    if kwargs is not None and not is_named:
        raise StrategyError(
            f"Asked to {verb} a function with kwargs={kwargs!r}. Give a dictionary of names."
        )


def _check_optimizer(model: Any) -> None:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and _DISTRIBUTED in vars(optimizer):
        raise ModelError(
            "Asked to parallelize a model that was compiled with hvd.DistributedOptimizer; both "
            "would reduce its gradients. Leave out one: unisono.parallel splits a global batch, "
            "hvd.DistributedOptimizer trains each process on batches of its own."
        )
