"""Find the parts of a Keras model that replicas must treat, and tell what kind they are."""

import types
from collections.abc import Iterable, Iterator
from typing import Any

import keras
from keras.src.backend.common import masking
from keras.src.losses import losses as keras_losses
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.trainers.compile_utils import CompileMetrics

_LOSSES_PER_SAMPLE = {
    keras_losses.mean_squared_error,
    keras_losses.mean_absolute_error,
    keras_losses.mean_absolute_percentage_error,
    keras_losses.mean_squared_logarithmic_error,
    keras_losses.cosine_similarity,
    keras_losses.huber,
    keras_losses.log_cosh,
    keras_losses.kl_divergence,
    keras_losses.poisson,
    keras_losses.categorical_crossentropy,
    keras_losses.categorical_focal_crossentropy,
    keras_losses.sparse_categorical_crossentropy,
    keras_losses.binary_crossentropy,
    keras_losses.binary_focal_crossentropy,
    keras_losses.ctc,
    keras_losses.categorical_generalized_cross_entropy,
}


# Their fn looks at the whole batch's labels before it decides how to read them.
_METRICS_OF_THE_BATCH = {keras_losses.hinge, keras_losses.squared_hinge}


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


def rename_variables(optimizer: Any, renamed: dict[Any, Any]) -> None:
    """Bring an optimizer's own records up to date, which know variables by keys."""
    # The last since Keras 3.16, in place of a cache that is filled as it trains.
    records = ("_trainable_variables_indices", "_var_to_optimizer_idx", "_weight_decay_by_var_key")
    for name in records:
        if name in vars(optimizer):
            record = getattr(optimizer, name)
            setattr(optimizer, name, {renamed.get(key, key): i for key, i in record.items()})
    if "_exclude_from_weight_decay" in vars(optimizer):
        excluded = optimizer._exclude_from_weight_decay
        optimizer._exclude_from_weight_decay = {renamed.get(key, key) for key in excluded}
        if "_exclude_from_weight_decay_cache" in vars(optimizer):
            optimizer._exclude_from_weight_decay_cache = {}


def seed_states(model: keras.Model) -> Iterator[Any]:
    """The state variables of a model's random layers."""
    for variable in model.non_trainable_variables:
        if variable.name == "seed_generator_state":
            yield variable


def is_mean_of_samples(compile_loss: Any, y_pred: Any) -> bool:
    """Whether the compiled loss is, for each output, the plain mean of per-sample losses."""
    if not compile_loss.built:
        return False
    if any(masking.get_keras_mask(leaf) is not None for leaf in keras.tree.flatten(y_pred)):
        return False
    return all(_is_per_sample(flat.loss) for flat in compile_loss._flat_losses)


def _is_per_sample(loss: Any) -> bool:
    if not isinstance(loss, LossFunctionWrapper) or loss.fn not in _LOSSES_PER_SAMPLE:
        return False
    is_own_call = type(loss).call is LossFunctionWrapper.call
    kwargs = getattr(loss, "_fn_kwargs", {})
    is_plain = kwargs.get("ignore_class") is None and kwargs.get("axis", -1) == -1
    return is_own_call and is_plain and loss.reduction in ("sum_over_batch_size", "mean")


def is_sum_of_samples(metric: Any) -> bool:
    """Whether a metric's state is a sum over samples, so that replicas' states add up."""
    if not type(metric).__module__.startswith("keras."):
        return False
    function = getattr(metric, "_fn", None)
    if function is None:
        return True
    if getattr(metric, "_fn_kwargs", {}).get("axis", -1) != -1:
        return False
    is_keras = isinstance(function, types.FunctionType) and function.__module__.startswith("keras.")
    return is_keras and function not in _METRICS_OF_THE_BATCH


def leaf_metrics(model: keras.Model) -> list[Any]:
    """The metrics that hold state, once each, whatever a user's `metrics` property lists."""
    if not model.compiled:
        return []  # A user's property may need what their `compile` makes.
    listed = [*model.metrics, model._loss_tracker, model._compile_metrics]
    if model._compile_loss is not None:
        listed += model._compile_loss.metrics
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
    losses = getattr(model._compile_loss, "_flat_losses", None) or []
    found = [
        *model._flatten_layers(),
        *leaf_metrics(model),
        *with_inner(optimizers_of(model)),
        *(one.loss for one in losses if one is not None),
        model._compile_loss,
    ]
    return list({id(one): one for one in found if hasattr(one, "__dict__")}.values())


def drifting_variables(model: keras.Model, sync_batch_norm: bool) -> Iterator[Any]:
    """Non-trainable state that a forward pass computes from the replica's own rows alone."""
    for layer in model._flatten_layers():
        is_custom = not type(layer).__module__.startswith("keras.")
        is_batch_norm = isinstance(layer, keras.layers.BatchNormalization)
        if is_custom or (is_batch_norm and not sync_batch_norm):
            for variable in layer._non_trainable_variables:
                if keras.backend.is_float_dtype(variable.dtype):
                    yield variable
