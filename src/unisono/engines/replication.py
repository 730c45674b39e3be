"""A training step on one replica's rows that adds up to the step on the global batch.

For the backends where a replica's program sees only its own rows (TensorFlow, torch). Each
replica r holds the share s_r = n_r / n of the global batch. The rule of this room: gradients are
summed over replicas weighted by s_r, so whatever a replica minimizes counts as a mean over its
rows. Where that is not so (a masked or contrastive loss, a metric whose state is no sum), the
outputs, targets and weights of all replicas are gathered first and every replica computes the
global value. `add_loss` and a user's own `train_step` count as batch means.
"""

import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import keras
from keras import ops
from keras.src import backend as keras_backend
from keras.src.losses import losses as keras_losses
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.trainers.compile_utils import CompileMetrics

from unisono.engines.batch_norm import (
    batch_norms,
    keep_moments_local,
    restore_moments,
    synchronize_moments,
)
from unisono.engines.hooks import bind, original, unbind

# A large stride: torch adds the two words of a seed, so neighbours must not count into each other.
SEED_STRIDE = 1_000_003

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


@dataclass
class StepState:
    """What one replica keeps while its step runs."""

    metric_variables: list[tuple[Any, Any]] = field(default_factory=list)
    """Each metric variable with its metric."""
    values_before: list[Any] = field(default_factory=list)
    replicated_metrics: set[int] = field(default_factory=set)
    """Ids of metrics that were given global values, so that all replicas agree on them."""
    is_reduced: bool = True
    weighted_optimizers: set[int] = field(default_factory=set)
    """Ids of optimizers whose loss has been weighted by share already, in `scale_loss`."""
    gathered: dict[int, tuple[Any, Any]] = field(default_factory=dict)


class Replica(Protocol):
    """One replica in the middle of a step, as an engine presents it."""

    state: StepState
    share: Any
    """Rows of this replica divided by the rows of the global batch."""
    metric_factor: Any
    """1, or 1 / replicas where the batch runs whole on each replica."""

    def after_data(self) -> AbstractContextManager[Any]:
        """What is done inside waits for the batch, and is not done where the data has ended."""

    def gather_rows(self, x: Any) -> Any:
        """Rows of all replicas in order; gradients flow into this replica's own rows."""

    def follow_changes(self, own: Any, gathered: Any) -> None:
        """Take over what was changed in place on gathered rows, where tensors can be changed."""

    def with_global_gradient(self, loss: Any) -> Any:
        """The same value; its gradient undoes the weighting by share."""

    def stack(self, x: Any) -> Any:
        """x of every replica along a new first axis, differentiably."""

    def total(self, tensors: Sequence[Any]) -> list[Any]:
        """Sums over replicas."""

    def reduce_gradients(
        self, gradients: Sequence[Any], variables: Sequence[Any], weight: Any
    ) -> list[Any]:
        """Sums over replicas times a weight; None where no replica has a gradient."""


class Replication:
    """Hooks on one model, its losses, metrics, optimizers and batch norms.

    `current()` is the replica whose step is running, or None: then every hook does what plain
    Keras does.
    """

    def __init__(
        self,
        model: keras.Model,
        current: Callable[[], Replica | None],
        *,
        sync_batch_norm: bool,
    ) -> None:
        self._model = model
        self._current = current
        self._sync_batch_norm = sync_batch_norm
        self._hooked: list[tuple[Any, str]] = []
        self._drifting: list[Any] = []
        self.prepare()

    def prepare(self) -> None:
        """Hook whatever the model has now; call before every public training call."""
        model = self._model
        bind(model, "get_metrics_result", self._get_metrics_result)
        for layer in batch_norms(model):
            if self._sync_batch_norm:
                synchronize_moments(layer, self._current)
            else:
                keep_moments_local(layer)
        if model._compile_loss is not None:
            self._hook(model._compile_loss, "call", self._call_loss)
        for metric in _leaf_metrics(model):
            self._hook(metric, "update_state", self._update_metric)
        for optimizer in optimizers_of(model):
            self._hook(optimizer, "apply", self._apply_gradients)
            self._hook(optimizer, "scale_loss", self._scale_loss)
        self._drifting = list(_drifting_variables(model, self._sync_batch_norm))

    def release(self) -> None:
        unbind(self._model, "get_metrics_result")
        for target, name in self._hooked:
            unbind(target, name)
        for layer in batch_norms(self._model):
            restore_moments(layer)

    def run(self, name: str, data: Any) -> Any:
        """Run the class's own `train_step` or `test_step` on one replica's rows."""
        replica = self._current()
        assert replica is not None
        with replica.after_data():
            _start_metrics(self._model, replica.state)
        logs = original(self._model, name)(data)
        logs = self._global_logs(replica, logs)
        if name == "train_step" and self._drifting:
            means = replica.total([v.value * replica.share for v in self._drifting])
            for variable, mean in zip(self._drifting, means, strict=True):
                variable.assign(mean)
        return logs

    # -- hooks ---------------------------------------------------------------------------------

    def _hook(self, target: Any, name: str, function: Callable[..., Any]) -> None:
        if name in vars(target):
            return

        def hooked(*args: Any, **kwargs: Any) -> Any:
            replica = self._current()
            plain = original(target, name)
            if replica is None:
                return plain(*args, **kwargs)
            return function(replica, target, plain, *args, **kwargs)

        self._hooked.append((target, name))
        bind(target, name, hooked)

    def _call_loss(
        self,
        replica: Replica,
        compile_loss: Any,
        plain: Callable[..., Any],
        y_true: Any,
        y_pred: Any,
        sample_weight: Any = None,
    ) -> Any:
        if is_mean_of_samples(compile_loss, y_pred):
            return plain(y_true, y_pred, sample_weight)
        gathered = [_gather(replica, part) for part in (y_true, y_pred, sample_weight)]
        replica.state.replicated_metrics.update(id(metric) for metric in compile_loss.metrics)
        loss = replica.with_global_gradient(plain(*gathered))
        replica.follow_changes(sample_weight, gathered[2])
        return loss

    def _update_metric(
        self, replica: Replica, metric: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        replicated = replica.state.replicated_metrics
        if id(metric) in replicated:
            return plain(*args, **kwargs)
        leaves = [leaf for leaf in keras.tree.flatten((args, kwargs)) if leaf is not None]
        if any(_rank(leaf) for leaf in leaves):
            if not is_sum_of_samples(metric):
                args, kwargs = _gather(replica, (args, kwargs))
                replicated.add(id(metric))
        elif len(leaves) == 1:
            # A batch mean, such as the loss in a user's own train_step. (With a weight beside it,
            # which is the number of rows, the replicas' sums add up.)
            args, kwargs = keras.tree.map_structure(
                lambda leaf: None if leaf is None else _mean(replica, leaf), (args, kwargs)
            )
            replicated.add(id(metric))
        return plain(*args, **kwargs)

    def _apply_gradients(
        self,
        replica: Replica,
        optimizer: Any,
        plain: Callable[..., Any],
        grads: Sequence[Any],
        trainable_variables: Any = None,
    ) -> Any:
        variables = trainable_variables
        variables = optimizer._trainable_variables if variables is None else list(variables)
        weighted = replica.state.weighted_optimizers
        weight = 1.0 if id(optimizer) in weighted else replica.share
        weighted.discard(id(optimizer))
        reduced = replica.reduce_gradients(list(grads), variables, weight)
        return plain(reduced, trainable_variables)

    def _scale_loss(
        self, replica: Replica, optimizer: Any, plain: Callable[..., Any], loss: Any
    ) -> Any:
        # Weighted here and not later where there is a choice: gradients then are as large as on
        # one device all the way, and in half precision overflow where they do there.
        replica.state.weighted_optimizers.add(id(optimizer))
        return plain(loss) * ops.cast(replica.share, loss.dtype)

    def _get_metrics_result(self) -> Any:
        replica = self._current()
        if replica is not None:
            _reduce_metrics(replica)
        return original(self._model, "get_metrics_result")()

    def _global_logs(self, replica: Replica, logs: Any) -> Any:
        """The logs of a step, from metrics that count every replica's rows."""
        if replica.state.is_reduced:
            return logs
        # A user's own step that read its metrics itself, so before they were added up.
        results = self._get_metrics_result()
        if not isinstance(logs, dict):
            return keras.tree.map_structure(lambda log: _mean(replica, log), logs)
        metrics = {metric.name: metric for metric in self._model.metrics}
        fresh = {}
        for key, value in logs.items():
            if key in results:
                fresh[key] = results[key]
            elif key in metrics:
                fresh[key] = metrics[key].result()
            else:
                fresh[key] = keras.tree.map_structure(lambda v: _mean(replica, v), value)
        return fresh


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
    for name in ("_trainable_variables_indices", "_var_to_optimizer_idx"):
        if name in vars(optimizer):
            record = getattr(optimizer, name)
            setattr(optimizer, name, {renamed.get(key, key): i for key, i in record.items()})
    if "_exclude_from_weight_decay" in vars(optimizer):
        excluded = optimizer._exclude_from_weight_decay
        optimizer._exclude_from_weight_decay = {renamed.get(key, key) for key in excluded}
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
    if any(keras_backend.get_keras_mask(leaf) is not None for leaf in keras.tree.flatten(y_pred)):
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


def _leaf_metrics(model: keras.Model) -> list[Any]:
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


def _drifting_variables(model: keras.Model, sync_batch_norm: bool) -> Iterator[Any]:
    """Non-trainable state that a forward pass computes from the replica's own rows alone."""
    for layer in model._flatten_layers():
        is_custom = not type(layer).__module__.startswith("keras.")
        is_batch_norm = isinstance(layer, keras.layers.BatchNormalization)
        if is_custom or (is_batch_norm and not sync_batch_norm):
            for variable in layer._non_trainable_variables:
                if keras_backend.is_float_dtype(variable.dtype):
                    yield variable


def _start_metrics(model: keras.Model, state: StepState) -> None:
    """Set metrics to zero, so that what a step adds can be told apart and loses no digits."""
    state.metric_variables = [
        (v, metric) for metric in _leaf_metrics(model) for v in metric.variables
    ]
    state.values_before = [ops.copy(v.value) for v, _ in state.metric_variables]
    state.is_reduced = False
    for variable, metric in state.metric_variables:
        if is_sum_of_samples(metric):
            variable.assign(ops.zeros_like(variable.value))


def _reduce_metrics(replica: Replica) -> None:
    """Replace what this replica's rows added to the metrics by what all rows add."""
    state = replica.state
    if state.is_reduced:
        return
    state.is_reduced = True
    own, before = [], []
    for (variable, metric), value in zip(state.metric_variables, state.values_before, strict=True):
        if not is_sum_of_samples(metric):
            continue
        if id(metric) in state.replicated_metrics:
            variable.assign(value + variable.value)
        else:
            own.append(variable)
            before.append(value)
    added = replica.total([variable.value for variable in own])
    for variable, value, total in zip(own, before, added, strict=True):
        share = ops.cast(total, "float32") * replica.metric_factor
        is_float = keras_backend.is_float_dtype(variable.dtype)
        share = share if is_float else ops.round(share)
        variable.assign(value + ops.cast(share, variable.dtype))


def _gather(replica: Replica, structure: Any) -> Any:
    """A structure with the rows of all replicas in place of this one's, masks included."""

    def gather(leaf: Any) -> Any:
        if leaf is None or not _rank(leaf):
            return leaf
        known = replica.state.gathered.get(id(leaf))
        if known is not None:
            return known[1]
        gathered = replica.gather_rows(leaf)
        mask = keras_backend.get_keras_mask(leaf)
        if mask is not None:
            keras_backend.set_keras_mask(gathered, replica.gather_rows(mask))
        # The leaf is kept alive beside it: an id is only unique among living objects.
        replica.state.gathered[id(leaf)] = (leaf, gathered)
        return gathered

    return keras.tree.map_structure(gather, structure)


def _mean(replica: Replica, value: Any) -> Any:
    value = ops.convert_to_tensor(value)
    if not keras_backend.is_float_dtype(keras_backend.standardize_dtype(value.dtype)):
        return value
    mean: Any = replica.total([value * ops.cast(replica.share, value.dtype)])[0]
    return mean


def _rank(leaf: Any) -> int:
    return len(getattr(leaf, "shape", ()))
