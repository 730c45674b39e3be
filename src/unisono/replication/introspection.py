"""Find the optimizers, losses, metrics and state of a Keras model, and classify them."""

import types
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from unisono import keras_internals
from unisono.keras_internals import CompileMetrics, LossFunctionWrapper, layers_of, loss_functions
from unisono.keras_internals import rename_variables as rename_variables

_LOSSES_PER_SAMPLE = {
    loss_functions.mean_squared_error,
    loss_functions.mean_absolute_error,
    loss_functions.mean_absolute_percentage_error,
    loss_functions.mean_squared_logarithmic_error,
    loss_functions.cosine_similarity,
    loss_functions.huber,
    loss_functions.log_cosh,
    loss_functions.kl_divergence,
    loss_functions.poisson,
    loss_functions.categorical_crossentropy,
    loss_functions.categorical_focal_crossentropy,
    loss_functions.sparse_categorical_crossentropy,
    loss_functions.binary_crossentropy,
    loss_functions.binary_focal_crossentropy,
    loss_functions.ctc,
    loss_functions.categorical_generalized_cross_entropy,
}


# Their functions look at all labels of the batch to decide how to read them.
_METRICS_OF_THE_BATCH = {loss_functions.hinge, loss_functions.squared_hinge}


def optimizers_of(model: keras.Model) -> Iterator[Any]:
    """The optimizers that a model holds: the compiled one, and those of a user's own compile."""
    for value in list(vars(model).values()):
        if isinstance(value, keras.optimizers.Optimizer):
            yield value


def with_inner(optimizers: Iterable[Any]) -> Iterator[Any]:
    """Optimizers, each followed by those that it wraps."""
    for optimizer in optimizers:
        yield optimizer
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            yield from with_inner([optimizer.inner_optimizer])
        elif isinstance(optimizer, keras.optimizers.MultiOptimizer):
            yield from with_inner(optimizer.optimizers)


def seed_states(model: keras.Model) -> Iterator[Any]:
    """The state variables of a model's random layers."""
    for variable in model.non_trainable_variables:
        if variable.name == "seed_generator_state":
            yield variable


def is_mean_of_samples(compile_loss: Any, y_pred: Any) -> bool:
    """Whether the compiled loss is, for each output, the plain mean of per-sample losses."""
    if not compile_loss.built:
        return False
    if any(keras_internals.get_keras_mask(leaf) is not None for leaf in keras.tree.flatten(y_pred)):
        return False
    return all(map(_is_per_sample, keras_internals.losses_by_output(compile_loss)))


def _is_per_sample(loss: Any) -> bool:
    if not isinstance(loss, LossFunctionWrapper) or loss.fn not in _LOSSES_PER_SAMPLE:
        return False
    is_own_call = type(loss).call is LossFunctionWrapper.call
    kwargs = keras_internals.keywords_of(loss)
    is_plain = kwargs.get("ignore_class") is None and kwargs.get("axis", -1) == -1
    return is_own_call and is_plain and loss.reduction in ("sum_over_batch_size", "mean")


def is_sum_of_samples(metric: Any) -> bool:
    """Whether a metric's state is a sum over samples, so that replicas' states can be summed."""
    if not type(metric).__module__.startswith("keras."):
        return False
    function = keras_internals.function_of(metric)
    if function is None:
        return True
    if keras_internals.keywords_of(metric).get("axis", -1) != -1:
        return False
    is_keras = isinstance(function, types.FunctionType) and function.__module__.startswith("keras.")
    return is_keras and function not in _METRICS_OF_THE_BATCH


def leaf_metrics(model: keras.Model) -> list[Any]:
    """The metrics that hold state, once each, whatever a user's `metrics` property lists."""
    if not model.compiled:
        return []  # A user's property may need what their `compile` makes.
    loss = keras_internals.compiled_loss(model)
    listed = [
        *model.metrics,
        keras_internals.loss_tracker(model),
        keras_internals.compiled_metrics(model),
        *([] if loss is None else loss.metrics),
    ]
    leaves: dict[int, Any] = {}
    for metric in listed:
        if isinstance(metric, CompileMetrics):
            leaves.update((id(leaf), leaf) for leaf in metric.metrics)
        elif metric is not None:
            leaves[id(metric)] = metric
    return list(leaves.values())


def objects_with_state(model: keras.Model) -> list[Any]:
    """What a step of a model runs code of, and may keep something in: its layers, losses, metrics
    and optimizers."""
    loss = keras_internals.compiled_loss(model)
    found = [
        *layers_of(model),
        *leaf_metrics(model),
        *with_inner(optimizers_of(model)),
        *keras_internals.losses_by_output(loss),
        loss,
    ]
    return list({id(one): one for one in found if hasattr(one, "__dict__")}.values())


def values_in_attributes(model: keras.Model) -> Iterator[Any]:
    """What layers keep in attributes of theirs, in lists, tuples, dictionaries and sets too."""
    left = [value for layer in layers_of(model) for value in vars(layer).values()]
    seen: set[int] = set()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, (list, tuple, set)):
            left.extend(value)
        else:
            yield value


def drifting_variables(model: keras.Model, sync_batch_norm: bool) -> Iterator[Any]:
    """Non-trainable state that a forward pass computes from the replica's own rows alone."""
    for layer in layers_of(model):
        is_custom = not type(layer).__module__.startswith("keras.")
        is_batch_norm = isinstance(layer, keras.layers.BatchNormalization)
        if is_custom or (is_batch_norm and not sync_batch_norm):
            for variable in keras_internals.own_non_trainable_variables(layer):
                if keras.backend.is_float_dtype(variable.dtype):
                    yield variable
