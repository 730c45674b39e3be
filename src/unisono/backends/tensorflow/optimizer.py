"""Keras' optimizers without what they do by themselves under a strategy of TensorFlow.

Keras' TensorFlow optimizer sums gradients and leaves the replica to update variables. Here the
gradients are summed before it begins, and each replica updates its own copies.
"""

import types
from typing import Any

from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

from unisono.hooks import bind, unbind

_PARTS = (
    "add_variable_from_reference",
    "_backend_update_step",
    "_apply_weight_decay",
    "_overwrite_model_variables_with_average_value",
    "_backend_increment_gradient_accumulators",
)


def stay_in_replica(optimizer: Any) -> None:
    for name in _PARTS:
        bind(optimizer, name, _past_tensorflow(type(optimizer), name).__get__(optimizer))
    if isinstance(optimizer, LossScaleOptimizer):
        bind(optimizer, "_tf_apply", optimizer._common_apply)


def leave_replica(optimizer: Any) -> None:
    unbind(optimizer, *_PARTS, "_tf_apply")


def _past_tensorflow(cls: type, name: str) -> Any:
    """A method of an optimizer class that knows nothing of Keras' TensorFlow version of it."""
    method = getattr(cls, name)
    if method is getattr(TFOptimizer, name):
        return getattr(BaseOptimizer, name)
    if "__class__" not in method.__code__.co_freevars:
        return method
    # One that overrides it and goes on to it with `super()`, as Nadam does: `super()` looks behind
    # the class in this cell.
    cells = zip(method.__code__.co_freevars, method.__closure__, strict=True)
    closure = tuple(
        types.CellType(TFOptimizer) if cell_name == "__class__" else cell
        for cell_name, cell in cells
    )
    return types.FunctionType(
        method.__code__, method.__globals__, name, method.__defaults__, closure
    )
