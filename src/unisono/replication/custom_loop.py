"""Custom training loops on replicas that see only their rows (TensorFlow, torch).

There is no trainer to hook here, so the optimizers, metrics and batch norms that a loop uses are
hooked one by one. A step begins with the batch of a distributed data set and ends with the call
or the iteration that it belongs to; what all rows add to the metrics is known after it.
"""

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras

from unisono.hooks import bind_in_step
from unisono.keras_internals import value_of
from unisono.replication.batch_norm import batch_norms, synchronize_moments
from unisono.replication.exact_draws import draw_for_batch
from unisono.replication.introspection import drifting_variables
from unisono.replication.replication import Kernels
from unisono.replication.step import (
    Replica,
    apply_gradients,
    reduce_metrics,
    scale_loss,
    start_metrics,
    update_metric,
)


class LoopReplication:
    """Hooks on the models, optimizers and metrics of one loop."""

    def __init__(
        self,
        current: Callable[[], Any],
        check_first: Callable[[Any, Sequence[Any]], None] | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        """`check_first` is given the replica and the variables that an optimizer first updates;
        `kernels`: see replication.
        """
        self._current = current
        self._check_first = check_first
        self._kernels = kernels
        self._checked: dict[int, Any] = {}
        self._metrics: dict[int, Any] = {}
        self.are_gradients_reduced = False
        """Whether the loop has called `reduce_gradients`, and is to do so for all gradients."""
        self._models: dict[int, Any] = {}
        draw_for_batch(current)

    def take(
        self, models: Iterable[Any], optimizers: Iterable[Any], metrics: Iterable[Any]
    ) -> None:
        """Hook objects that are not hooked yet."""
        for optimizer in optimizers:
            self._hook(optimizer, "apply", self._apply_gradients)
            self._hook(optimizer, "scale_loss", scale_loss)
        for metric in metrics:
            self._metrics[id(metric)] = metric
            self._hook(metric, "update_state", update_metric)
            self._hook(metric, "result", _result_of_all)
        for model in models:
            self._models[id(model)] = model
            for layer in batch_norms(model):
                synchronize_moments(layer, self._current)
            if self._kernels is not None:
                self._kernels.use_kernels(model, self._current, sync_batch_norm=True)

    def start(self, replica: Replica) -> None:
        replica.state.reduces_updated_only = True
        replica.state.are_gradients_reduced = self.are_gradients_reduced
        start_metrics(self._metrics.values(), replica.state)

    def reduce_gradients(
        self, replica: Replica, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> list[Any]:
        """Reduce gradients now; from here on optimizers apply theirs as they are."""
        self.leave_gradients(replica)
        weight = 1.0 if replica.state.is_weighted else replica.share
        return replica.reduce_gradients(gradients, variables, weight)

    def leave_gradients(self, replica: Replica | None) -> None:
        self.are_gradients_reduced = True
        if replica is not None:
            replica.state.are_gradients_reduced = True

    def finish(self, replica: Replica) -> None:
        """Make metrics and drifting state those of all rows."""
        reduce_metrics(replica)
        drifting = self._drifting_in(replica) if replica.state.has_trained else []
        if drifting:
            means = replica.all_reduce([v.value * replica.share for v in drifting])
            for variable, mean in zip(drifting, means, strict=True):
                variable.assign(mean)

    def _drifting_in(self, replica: Replica) -> list[Any]:
        """Of the models that the step has trained, in an order that all replicas share."""
        found = {}
        for model in self._models.values():
            if _is_trained(model, replica.state.trained):
                for variable in drifting_variables(model, sync_batch_norm=True):
                    found[id(variable)] = variable
        return sorted(found.values(), key=lambda variable: str(variable.path))

    def _apply_gradients(
        self,
        replica: Replica,
        optimizer: Any,
        plain: Callable[..., Any],
        grads: Sequence[Any],
        trainable_variables: Any = None,
    ) -> Any:
        variables = None if trainable_variables is None else list(trainable_variables)
        if self._check_first is not None and variables and id(optimizer) not in self._checked:
            self._checked[id(optimizer)] = optimizer
            self._check_first(replica, variables)
        return apply_gradients(replica, optimizer, plain, grads, variables)

    def _hook(self, target: Any, name: str, function: Callable[..., Any]) -> None:
        bind_in_step(target, name, function, self._current)


def living_keras_objects() -> tuple[list[Any], list[Any], list[Any]]:
    """Models, optimizers and metrics of this process.

    There is no register of them, and a loop may hold them anywhere in a program.
    """
    found = gc.get_objects()
    kinds = (keras.Model, keras.optimizers.Optimizer, keras.metrics.Metric)
    models, optimizers, metrics = ([o for o in found if issubclass(type(o), k)] for k in kinds)
    return models, optimizers, metrics


def _is_trained(model: Any, trained: set[int]) -> bool:
    """Whether variables, or their values as torch's own optimizers know them, were updated."""
    return any(id(v) in trained or id(value_of(v)) in trained for v in model.variables)


def _result_of_all(
    replica: Replica, metric: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    reduce_metrics(replica)
    return plain(*args, **kwargs)
