"""One replica in the middle of a step: what it does to its gradients and metrics.

Each replica r holds the share s_r = n_r / n of the global batch. Gradients are summed over replicas
weighted by s_r, unless the loss has been weighted already; what a replica's rows added to a metric
is replaced, at the end of the step, by what all rows add. What is a sum over rows and no mean (see
loss_kinds) is multiplied by 1 / s_r first.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import keras
import numpy as np
from keras import ops

from unisono.keras_internals import get_keras_mask, optimized_variables, set_keras_mask
from unisono.replication.introspection import is_sum_of_samples
from unisono.replication.loss_kinds import MEAN, SUM, KnownKinds
from unisono.replication.random_state import seed_stride as seed_stride

_MOST_ELEMENTS = 4096


@dataclass
class StepState:
    """What one replica keeps while its step runs."""

    metric_variables: list[tuple[Any, Any]] = field(default_factory=list)
    """Each metric variable with its metric."""
    values_before: list[Any] = field(default_factory=list)
    replicated_metrics: set[int] = field(default_factory=set)
    """Ids of metrics that were given global values, so that all replicas agree on them."""
    updated_metrics: dict[int, int] = field(default_factory=dict)
    """Ids of metrics that this step updated, each with its place in their order."""
    reduces_updated_only: bool = False
    """Whether metrics that the step does not use may differ between replicas: in a custom
    training loop they are found by a search through the process, in no meaningful order."""
    is_reduced: bool = True
    results: dict[str, Any] = field(default_factory=dict)
    """The results of metrics that the trainer has read since then."""
    weighted_optimizers: set[int] = field(default_factory=set)
    """Ids of optimizers whose loss has been weighted by share already, in `scale_loss`."""
    gathered: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    adds_up: bool = False
    """Whether losses are parts of a sum over replicas, as `compute_average_loss` makes them."""
    parts_of_sums: dict[int, Any] = field(default_factory=dict)
    """Such losses by id, kept alive."""
    has_trained: bool = False
    trained: set[int] = field(default_factory=set)
    """Ids of the variables that optimizers of this step have updated."""
    are_gradients_reduced: bool = False
    """Whether the loop reduces its gradients by `reduce_gradients`, so that optimizers need not."""
    unscaled: set[int] = field(default_factory=set)
    """Ids of torch's own optimizers whose gradients were reduced before they were unscaled."""
    kinds: KnownKinds | None = None
    """What the losses of this step are; None where all are means."""
    num_given: dict[int, int] = field(default_factory=dict)
    """How many values metrics and layers, by id, were given in this step."""
    trial: "Trial | None" = None
    """What is noted where the step is only tried, without an update of weights."""

    @property
    def is_weighted(self) -> bool:
        """Whether what is minimized now has been weighted by the share of rows already."""
        are_sums = self.kinds is not None and self.kinds.are_all_sums
        return self.adds_up or bool(self.weighted_optimizers) or are_sums


@dataclass
class Trial:
    """What a step that is only tried has minimized and reported, as numbers of NumPy."""

    gradients: dict[int, list[Any]] = field(default_factory=dict)
    """By the id of an optimizer: some elements of each gradient that it was to apply."""
    values: dict[int, list[Any]] = field(default_factory=dict)
    """By the id of a metric or layer: the scalars that it was given."""
    logs: dict[str, Any] = field(default_factory=dict)


class Replica(Protocol):
    """One replica in the middle of a step, as a backend presents it."""

    state: StepState
    share: Any
    """Rows of this replica divided by the rows of the global batch."""
    metric_factor: Any
    """1, or 1 / replicas where the batch runs whole on each replica."""
    sum_scale: Any
    """Makes a sum over rows count as a mean: 1 / share, or 1 where each replica has all rows."""
    may_be_empty: bool
    """Whether a replica can be without rows."""
    num_rows: Any
    """Rows of the global batch."""
    bounds: tuple[Any, Any]
    """The first and the past-the-last of them that this replica has."""

    def gather_rows(self, x: Any) -> Any:
        """Rows of all replicas in order; gradients flow into this replica's own rows."""

    def follow_changes(self, own: Any, gathered: Any) -> None:
        """Take over what was changed in place on gathered rows, where tensors can be changed."""

    def with_global_gradient(self, loss: Any) -> Any:
        """The same value; its gradient undoes the weighting by share."""

    def moments(self, x: Any, mask: Any, axes: list[int]) -> tuple[Any, Any]:
        """Mean and variance of the inputs of a batch norm over the rows of all replicas."""

    def stack(self, x: Any) -> Any:
        """x of every replica along a new first axis, differentiably."""

    def all_reduce(self, tensors: Sequence[Any]) -> list[Any]:
        """Sums over replicas."""

    def reduce_gradients(
        self, gradients: Sequence[Any], variables: Sequence[Any], weight: Any
    ) -> list[Any]:
        """Sums over replicas times a weight; None where no replica has a gradient."""

    def check_reduced(self, optimizer: Any, gradients: Sequence[Any]) -> None:
        """StrategyError where gradients that an optimizer applies as they are differ."""


def update_metric(
    replica: Replica, metric: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    replicated = replica.state.replicated_metrics
    updated = replica.state.updated_metrics
    updated.setdefault(id(metric), len(updated))
    if id(metric) in replicated:
        return plain(*args, **kwargs)
    leaves = [leaf for leaf in keras.tree.flatten((args, kwargs)) if leaf is not None]
    kinds = [None if _rank(leaf) else _kind_given(replica, metric, leaf) for leaf in leaves]
    if None in kinds:
        args, kwargs = _sums_as_means(replica, kinds, (args, kwargs))
        if not is_sum_of_samples(metric):
            args, kwargs = gather(replica, (args, kwargs))
            replicated.add(id(metric))
    elif kinds and all(kind == MEAN for kind in kinds[1:]):
        # A batch mean, such as the loss in a user's own train_step.
        join = _sum_of_parts if id(leaves[0]) in replica.state.parts_of_sums else mean
        args, kwargs = _sums_as_means(replica, kinds, (args, kwargs))
        args, kwargs = keras.tree.map_structure(
            lambda leaf: None if leaf is None else join(replica, leaf), (args, kwargs)
        )
        replicated.add(id(metric))
    else:
        # With a weight beside it, which is the number of rows, the replicas' states can be summed.
        args, kwargs = _sums_as_means(replica, kinds[:1], (args, kwargs))
    return plain(*args, **kwargs)


def apply_gradients(
    replica: Replica,
    optimizer: Any,
    plain: Callable[..., Any],
    grads: Sequence[Any],
    trainable_variables: Any = None,
) -> Any:
    variables = trainable_variables
    variables = optimized_variables(optimizer) if variables is None else list(variables)
    weighted = replica.state.weighted_optimizers
    is_weighted = replica.state.adds_up or id(optimizer) in weighted
    weight = 1.0 if is_weighted else gradient_weight(replica, optimizer)
    replica.state.has_trained = True
    replica.state.trained.update(map(id, variables))
    weighted.discard(id(optimizer))
    if replica.state.are_gradients_reduced:
        grads = list(grads)
        replica.check_reduced(optimizer, grads)
        return plain(grads, trainable_variables)
    reduced = replica.reduce_gradients(list(grads), variables, weight)
    if replica.state.trial is not None:
        replica.state.trial.gradients.setdefault(id(optimizer), []).extend(map(some_of, reduced))
        return None
    return plain(reduced, trainable_variables)


def not_reduced_error(optimizer: Any) -> str:
    return (
        f"The optimizer {getattr(optimizer, 'name', type(optimizer).__name__)} was given gradients "
        "that differ between replicas, in a loop that calls strategy.reduce_gradients: optimizers "
        "then apply gradients as they are. Pass every gradient of the loop through "
        "reduce_gradients, after the last backward pass."
    )


def scale_loss(replica: Replica, optimizer: Any, plain: Callable[..., Any], loss: Any) -> Any:
    if replica.state.adds_up:
        return plain(loss)
    # Weighted here and not later where there is a choice: gradients then are as large as on
    # one device all the way, and in half precision overflow where they do there.
    replica.state.weighted_optimizers.add(id(optimizer))
    scaled = loss if replica.state.trial is not None else plain(loss)
    return _times(scaled, gradient_weight(replica, optimizer))


def add_loss(replica: Replica, layer: Any, plain: Callable[..., Any], loss: Any) -> Any:
    losses = keras.tree.flatten(loss)
    kinds = [_kind_given(replica, layer, one) for one in losses]
    return plain([term(replica, one, kind) for one, kind in zip(losses, kinds, strict=True)])


def term(replica: Replica, loss: Any, kind: str = MEAN) -> Any:
    """A term of an objective, scaled such that it fits with the others."""
    is_sum = kind == SUM
    is_base_sum = replica.state.kinds is not None and replica.state.kinds.base == SUM
    if loss is None or is_sum == is_base_sum:
        return loss
    scale = replica.sum_scale
    return _times(loss, scale if is_sum else 1.0 / scale)


def start_metrics(metrics: Iterable[Any], state: StepState) -> None:
    """Set metrics to zero, so that what a step adds can be told apart and loses no digits."""
    state.metric_variables = [(v, metric) for metric in metrics for v in metric.variables]
    state.values_before = [ops.copy(v.value) for v, _ in state.metric_variables]
    state.is_reduced = False
    for variable, metric in state.metric_variables:
        if is_sum_of_samples(metric):
            variable.assign(ops.zeros_like(variable.value))


def reduce_metrics(replica: Replica) -> None:
    """Replace what this replica's rows added to the metrics by what all rows add."""
    state = replica.state
    if state.is_reduced:
        return
    state.is_reduced = True
    own = []
    for (variable, metric), value in zip(state.metric_variables, state.values_before, strict=True):
        if not is_sum_of_samples(metric):
            continue
        is_unused = state.reduces_updated_only and id(metric) not in state.updated_metrics
        if is_unused or id(metric) in state.replicated_metrics:
            variable.assign(value + variable.value)
        else:
            own.append((metric, variable, value))
    if state.reduces_updated_only:
        own.sort(key=lambda entry: state.updated_metrics[id(entry[0])])
    added = replica.all_reduce([variable.value for _, variable, _ in own])
    for (_, variable, value), total in zip(own, added, strict=True):
        share = ops.cast(total, "float32") * replica.metric_factor
        is_float = keras.backend.is_float_dtype(variable.dtype)
        share = share if is_float else ops.round(share)
        variable.assign(value + ops.cast(share, variable.dtype))


def gather(replica: Replica, structure: Any) -> Any:
    """A structure with the rows of all replicas in place of this one's, masks included."""

    def gather_leaf(leaf: Any) -> Any:
        if leaf is None or not _rank(leaf):
            return leaf
        known = replica.state.gathered.get(id(leaf))
        if known is not None:
            return known[1]
        gathered = replica.gather_rows(leaf)
        mask = get_keras_mask(leaf)
        if mask is not None:
            set_keras_mask(gathered, replica.gather_rows(mask))
        # The leaf is kept alive beside it: an id is only unique among living objects.
        replica.state.gathered[id(leaf)] = (leaf, gathered)
        return gathered

    return keras.tree.map_structure(gather_leaf, structure)


def mean(replica: Replica, value: Any) -> Any:
    value = ops.convert_to_tensor(value)
    if not keras.backend.is_float_dtype(keras.backend.standardize_dtype(value.dtype)):
        return value
    total: Any = replica.all_reduce([_times(value, replica.share)])[0]
    return total


def sum_as_mean(replica: Replica, value: Any, kind: str | None) -> Any:
    """A value that counts as a mean over the rows of this replica."""
    if kind != SUM:
        return value
    value = ops.convert_to_tensor(value)
    is_float = keras.backend.is_float_dtype(keras.backend.standardize_dtype(value.dtype))
    value = value if is_float else ops.cast(value, "float32")
    return _times(value, replica.sum_scale)


def _sums_as_means(replica: Replica, kinds: Sequence[str | None], structure: Any) -> Any:
    """A structure whose first leaves are of these kinds."""
    left = iter(kinds)
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else sum_as_mean(replica, leaf, next(left, None)),
        structure,
    )


def _kind_given(replica: Replica, target: Any, value: Any) -> str:
    """What a metric or a layer is given, by its place in the step; empty where that is unknown."""
    state = replica.state
    place = state.num_given.get(id(target), 0)
    state.num_given[id(target)] = place + 1
    if state.trial is not None:
        state.trial.values.setdefault(id(target), []).append(to_number(value))
    return "" if state.kinds is None else state.kinds.of(target, place)


def gradient_weight(replica: Replica, optimizer: Any) -> Any:
    """What gradients that reach an optimizer count in their sum over replicas."""
    is_sum = replica.state.kinds is not None and replica.state.kinds.of(optimizer) == SUM
    return replica.share * replica.sum_scale if is_sum else replica.share


def to_number(value: Any) -> Any:
    """The sum of a value's elements: outside of graphs."""
    return np.sum(
        ops.convert_to_numpy(ops.stop_gradient(ops.convert_to_tensor(value))), dtype=float
    )


def some_of(gradient: Any) -> Any:
    """Elements of a gradient that stand for all of them."""
    if gradient is None:
        return None
    if hasattr(gradient, "dense_shape"):
        gradient = ops.sum(gradient.values, axis=0)  # Rows of an embedding, in whatever order.
    flat = ops.reshape(gradient, (-1,))
    every = max(1, flat.shape[0] // _MOST_ELEMENTS)
    return np.asarray(ops.convert_to_numpy(flat[::every]), "float64")


def _sum_of_parts(replica: Replica, value: Any) -> Any:
    return replica.all_reduce([value])[0]


def _times(value: Any, factor: Any) -> Any:
    """A number stays one: as a tensor it would be copied to a GPU while the host waits."""
    return value * (factor if isinstance(factor, float) else ops.cast(factor, value.dtype))


def _rank(leaf: Any) -> int:
    return len(getattr(leaf, "shape", ()))
