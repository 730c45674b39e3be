"""Models with a distributed optimizer: how they train, and how they are loaded.

An optimizer does not know its model; only `compile` sees both. So `compile` is wrapped between
`hvd.init()` and `hvd.shutdown()`, and models without a distributed optimizer are not changed.
"""

import functools
import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from unisono.errors import ModelError
from unisono.hooks import Patch, unbind
from unisono.horovod.frameworks import framework
from unisono.horovod.optimizer import REDUCTION, DistributedOptimizer, GradientReduction, distribute
from unisono.horovod.reductions import Compression, Compressor

_PARALLEL = "_unisono"
_models: "dict[int, weakref.ref[Any]]" = {}
"""In the order in which they were compiled, by `id`."""


def watch_compile() -> None:
    """Wrap `compile` of Keras' models."""
    global _is_watching
    if not _is_watching:
        _compile.apply()
        _is_watching = True


def leave_compile() -> None:
    """Restore `compile`."""
    global _is_watching
    if _is_watching:
        _compile.lift()
        _is_watching = False


def _attaching(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        attach(self)
        return result

    return compile


def _class_with_compile() -> Any:
    # The class that defines it: Keras compares with it to see whether a model overrides it.
    return next(each for each in keras.Model.__mro__ if "compile" in vars(each))


_compile = Patch(_class_with_compile, "compile", _attaching)
_is_watching = False


def attach(model: Any) -> None:
    """Prepare a compiled model for its optimizer, if that is a distributed one."""
    reduction = _lift(model.optimizer)
    if _models.pop(id(model), _nothing)() is model:
        unbind(model, "make_train_function")
    if reduction is None:
        return
    if _PARALLEL in vars(model):
        raise ModelError(
            "A parallel model was compiled with hvd.DistributedOptimizer; both would reduce its "
            "gradients. Leave out one: unisono.parallel splits a global batch, "
            "hvd.DistributedOptimizer trains each process on its own batches."
        )
    _models[id(model)] = weakref.ref(model)
    framework().bind_model(model, reduction)


def compiled_models() -> list[Any]:
    """The models that distributed optimizers train, in the order of their compilation."""
    # Models are in reference cycles: drop those that are no longer in use.
    gc.collect()
    found = [reference() for reference in _models.values()]
    return [model for model in found if model is not None]


def _nothing() -> None:
    return None


def _lift(optimizer: Any) -> GradientReduction | None:
    """The reduction of an optimizer; a LossScaleOptimizer takes that of its inner optimizer.

    The outer one decides whether gradients are finite, which all processes must decide alike.
    """
    reduction: GradientReduction | None = None
    if optimizer is None or REDUCTION in vars(optimizer):
        return None if optimizer is None else vars(optimizer).get(REDUCTION)
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is None or REDUCTION not in vars(inner):
        return None
    reduction = vars(inner)[REDUCTION]
    unbind(inner, REDUCTION, "apply", "stateless_apply", "register_local_var")
    assert reduction is not None
    distribute(optimizer, reduction)
    return reduction


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a saved model and distribute its optimizer, with its saved state.

    Takes any Keras file, whether its optimizer was distributed or not.

    >>> import keras, unisono.horovod as hvd
    >>> hvd.init()
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    >>> model.save("model.keras")
    >>> type(hvd.load_model("model.keras").optimizer).__name__
    'Adam'
    """
    if legacy_opts:
        raise ValueError("Received legacy_opts=True. Keras 3 has no legacy optimizers.")
    objects = {each.__name__: each for each in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects=objects | dict(custom_objects or {}))
    if model.optimizer is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
        attach(model)
    return model
