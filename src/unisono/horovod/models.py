"""What a model must do differently once a distributed optimizer trains it.

An optimizer does not know the model that it is given to; only `compile` sees both. So between
`hvd.init()` and `hvd.shutdown()`, `compile` tells us of models that get a distributed optimizer.
Others are left alone.
"""

import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import keras

from unisono.errors import ModelError
from unisono.hooks import Patch, unbind

REDUCTION = "_unisono_horovod"
_PARALLEL = "_unisono"
_models: "dict[int, weakref.ref[Any]]" = {}
"""In the order in which they were compiled, by `id`."""


def watch_compile() -> None:
    """Look at every model that is compiled from now on."""
    global _is_watching
    if not _is_watching:
        _compile.apply()
        _is_watching = True


def leave_compile() -> None:
    """Give Keras its own method back."""
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
    # The one that defines it: Keras compares with that to see whether a model has its own.
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
            "hvd.DistributedOptimizer trains each process on batches of its own."
        )
    _models[id(model)] = weakref.ref(model)
    if keras.backend.backend() == "jax":
        from unisono.horovod.jax_step import train_in_parts

        train_in_parts(model, reduction)
    elif keras.backend.backend() == "tensorflow" and model.jit_compile:
        # A graph that XLA compiles has no way back to Python, where collectives are agreed on.
        model.jit_compile = False
        warnings.warn(
            "XLA is switched off for a model with hvd.DistributedOptimizer on TensorFlow. Compile "
            "with jit_compile=False to say so.",
            stacklevel=3,
        )


def compiled_models() -> list[Any]:
    """The models that distributed optimizers train, in the order of their compilation."""
    # Models are parts of cycles: which of those that nobody holds are still there is chance.
    gc.collect()
    found = [reference() for reference in _models.values()]
    return [model for model in found if model is not None]


def _nothing() -> None:
    return None


def _lift(optimizer: Any) -> Any:
    """The reduction of an optimizer; that of one with loss scaling around it moves outwards.

    Whether gradients are finite is decided on the outside, and must be by all processes alike.
    """
    if optimizer is None or REDUCTION in vars(optimizer):
        return None if optimizer is None else vars(optimizer)[REDUCTION]
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is None or REDUCTION not in vars(inner):
        return None
    from unisono.horovod.optimizer import distribute

    reduction = vars(inner)[REDUCTION]
    unbind(inner, REDUCTION, "apply", "stateless_apply", "register_local_var")
    distribute(optimizer, reduction)
    return reduction
