"""The public call: put a model on every device of this machine, in place."""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unisono.backends import Adopted, load_backend
from unisono.data.shards import nearest_divisible
from unisono.devices import Placement, choose, choose_own, simulated_gpus, warn_of_cores
from unisono.devices.host_memory import is_kept
from unisono.errors import ModelError, StrategyError
from unisono.hooks import bind, original, unbind
from unisono.launch.client import current_world
from unisono.launch.preemption_signal import is_handling_signals
from unisono.monitor.events import runs_folder

if TYPE_CHECKING:
    import keras

_ADOPTED = "_unisono"
_DISTRIBUTED = "_unisono_horovod"  # What unisono.horovod, a room above, keeps on an optimizer.


def parallel(
    model: "keras.Model",
    *,
    replicas: int | None = None,
    gpus: int | Sequence[int] | None = None,
    sync_batch_norm: bool = True,
) -> "keras.Model":
    """Train a Keras model on several devices; returns the model itself.

    Without arguments every GPU is used, or one replica where there is none. In a run of several
    processes (`unisono run`) the model of each process is one replica. `replicas=4` takes
    four GPUs, or four CPU replicas on a machine without GPUs; `gpus=[0, 2]` takes those two. The
    batch given to `fit` stays the global batch, and the result is that of one device.

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
    import keras

    from unisono.checkpoint.saving import protect_saves

    check_model(model)
    _check_optimizer(model)
    engine = load_backend(keras.backend.backend())
    before: Adopted | None = vars(model).get(_ADOPTED)
    if before is not None:
        if (before.placement, before.sync_batch_norm) == (placement, sync_batch_norm):
            return model
        engine.prepare(placement)
        release(model)
    else:
        engine.prepare(placement)
    vars(model)[_ADOPTED] = engine.adopt(model, placement, sync_batch_norm=sync_batch_norm)
    protect_saves(model)
    _watch_fits(model, placement)
    _announce_at_first_fit(model, placement, engine.backend)
    return model


def place(*, replicas: int | None, gpus: int | Sequence[int] | None) -> Placement:
    """The devices that a request means: this machine's, or this process' own in a run of more."""
    world = current_world()
    if world is None:
        placement = choose(replicas=replicas, gpus=gpus, num_visible_gpus=count_gpus())
        warn_of_cores(placement)
        return placement
    return choose_own(world.topology, replicas=replicas, gpus=gpus, num_visible_gpus=count_gpus())


def release(model: "keras.Model") -> "keras.Model":
    """Give a parallel model back to plain Keras on one device, with its present values.

    >>> import keras
    >>> model = parallel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), replicas=2)
    >>> release(model) is model
    True
    """
    check_model(model, "release")
    adopted = adopted_as(model)
    if adopted is not None:
        from unisono.checkpoint.saving import SAVES

        adopted.release()
        unbind(model, _ADOPTED, "fit", *SAVES)
    return model


def is_parallel(model: Any) -> bool:
    """Whether a model trains on replicas."""
    return _ADOPTED in vars(model)


def adopted_as(model: Any) -> Adopted | None:
    """What an engine keeps of a model that trains on replicas."""
    adopted: Adopted | None = vars(model).get(_ADOPTED)
    return adopted


def count_gpus() -> int:
    """How many GPUs the chosen Keras backend sees here; simulated ones count."""
    import keras

    # Counting real ones starts a backend, so only ask where the answer matters.
    return simulated_gpus() or load_backend(keras.backend.backend()).num_gpus()


def check_model(model: object, call: str = "parallel") -> None:
    """Raise ModelError for what is not a model of Keras, by the public call that was given it."""
    import keras

    if not isinstance(model, keras.Model):
        wish = {"parallel": "parallelize", "release": "release"}.get(
            call, "compare the replicas of"
        )
        raise ModelError(
            f"Asked to {wish} a {type(model).__name__}; unisono.{call} takes a "
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


def _watch_fits(model: Any, placement: Placement) -> None:
    """Let each `fit` publish how it goes, give back memory, and make room when it is warned."""
    from unisono.checkpoint.saving import protect_backups
    from unisono.replication.fit_watch import LooksAtSteps, watched
    from unisono.replication.memory_watch import GiveBack
    from unisono.replication.preemption import MakeRoom
    from unisono.replication.publishing import Publish

    def watchers(callbacks: list[Any], given: dict[str, Any]) -> list[Any]:
        protect_backups(callbacks)
        is_told = any(hasattr(callback, "on_preempt") for callback in callbacks)
        chosen: list[Any] = [MakeRoom(callbacks)] if is_handling_signals() or is_told else []
        chosen += [callback.steps for callback in callbacks if isinstance(callback, LooksAtSteps)]
        if is_kept(os.environ):
            chosen.append(GiveBack())
        if (folder := runs_folder(os.environ)) is not None:
            batch = _global_batch(
                given.get("x"), given.get("batch_size"), given.get("steps_per_epoch")
            )
            chosen.append(Publish(folder, batch, placement))
        return chosen

    bind(model, "fit", watched(vars(model).get("fit") or original(model, "fit"), watchers))


def _announce_at_first_fit(model: Any, placement: Placement, backend: str) -> None:
    fit_of_engine = vars(model).get("fit")

    def fit(
        x: Any = None, y: Any = None, batch_size: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        unbind(model, "fit")
        if fit_of_engine is not None:
            bind(model, "fit", fit_of_engine)
        world = current_world()
        if world is None or world.is_chief:
            global_batch = _global_batch(x, batch_size, kwargs.get("steps_per_epoch"))
            print(_announcement(backend, placement, global_batch), flush=True)
            _warn_of_batch(global_batch, placement, backend)
        return model.fit(x, y, batch_size, *args, **kwargs)

    bind(model, "fit", fit)


def _announcement(backend: str, placement: Placement, global_batch: int | None) -> str:
    count = placement.num_replicas
    noun = "replica" if count == 1 else "replicas"
    line = f"unisono: {backend}, {count} {noun} on {placement}; global batch "
    if global_batch is None:
        return line + f"as the data yields it, 1/{count} of it per replica"
    if global_batch % count == 0:
        return line + f"{global_batch} = {count} x {global_batch // count} per replica"
    return line + f"{global_batch}, about {global_batch / count:.1f} per replica"


def _warn_of_batch(global_batch: int | None, placement: Placement, backend: str) -> None:
    count = placement.num_replicas
    if global_batch is None or global_batch % count == 0:
        return
    better = nearest_divisible(global_batch, count)
    if global_batch < count:
        warnings.warn(
            f"A global batch of {global_batch} is smaller than the {count} replicas, so replicas "
            f"idle. Use a batch_size of {better} or more, or fewer replicas.",
            stacklevel=4,
        )
    elif backend == "jax":
        warnings.warn(
            f"A global batch of {global_batch} does not divide by {count} replicas; on JAX every "
            f"replica then computes all of it, which is exact but no faster. Use batch_size="
            f"{better}.",
            stacklevel=4,
        )


def _global_batch(x: Any, batch_size: int | None, steps_per_epoch: int | None) -> int | None:
    """The global batch that `fit` will use, or None where only the data knows."""
    from keras.src.trainers.data_adapters.array_data_adapter import can_convert_arrays

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
        batch_size = -(-num_samples // steps_per_epoch) if steps_per_epoch else 32
    return int(min(batch_size, num_samples))


def _leaves(structure: Any) -> list[Any]:
    import keras

    return [leaf for leaf in keras.tree.flatten(structure) if leaf is not None]
