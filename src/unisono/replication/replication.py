"""A training step on one replica's rows; all replicas together make the step on the global batch.

For the backends where a replica's program sees only its own rows (TensorFlow, torch). Each
replica r holds the fraction s_r = n_r / n of the global batch. Gradients are summed over replicas
weighted by s_r, so whatever a replica minimizes counts as a mean over its rows. Where
that is not so (a masked or contrastive loss, a metric whose state is no sum), the
outputs, targets and weights of all replicas are gathered first and every replica computes the
global value. `add_loss`, `compute_loss` and a user's own `train_step` may have sums: loss_check
finds out.
"""

import operator
from collections.abc import Callable
from typing import Any, Protocol

import keras

from unisono.hooks import bind, bind_in_step, original, unbind
from unisono.keras_internals import (
    REGULARIZATION_LOSSES,
    compiled_loss,
    compiled_metrics,
    layers_of,
    own_metrics_result,
)
from unisono.replication.batch_norm import (
    batch_norms,
    keep_moments_local,
    restore_moments,
    synchronize_moments,
)
from unisono.replication.exact_draws import draw_for_batch
from unisono.replication.introspection import (
    drifting_variables,
    is_mean_of_samples,
    leaf_metrics,
    optimizers_of,
)
from unisono.replication.loss_kinds import KnownKinds, LossKinds, adding_layers, must_check
from unisono.replication.step import (
    Replica,
    add_loss,
    apply_gradients,
    gather,
    mean,
    reduce_metrics,
    scale_loss,
    start_metrics,
    sum_as_mean,
    term,
    to_number,
    update_metric,
)


class Kernels(Protocol):
    """Ways of computing layers that a backend has beside Keras' own."""

    def use_kernels(
        self, model: keras.Model, current: Callable[[], Any], *, sync_batch_norm: bool
    ) -> None:
        """Have a model's layers compute by them while a replica's step runs."""

    def leave_kernels(self, model: keras.Model) -> None:
        """Give the layers back to plain Keras."""


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
        kernels: Kernels | None = None,
    ) -> None:
        self._model = model
        self._current = current
        self._sync_batch_norm = sync_batch_norm
        self._kernels = kernels
        self._hooked: list[tuple[Any, str]] = []
        self._drifting: list[Any] = []
        self._kinds: dict[str, tuple[list[Any], LossKinds]] = {}
        self._known: dict[str, KnownKinds] = {}
        draw_for_batch(current)
        self.prepare()

    def prepare(self) -> None:
        """Hook whatever the model has now; call before every public training call."""
        model = self._model
        self._known = {}
        bind(model, "get_metrics_result", self._get_metrics_result)
        for layer in batch_norms(model):
            if self._sync_batch_norm:
                synchronize_moments(layer, self._current)
            else:
                keep_moments_local(layer)
        if self._kernels is not None:
            self._kernels.use_kernels(model, self._current, sync_batch_norm=self._sync_batch_norm)
        if (loss := compiled_loss(model)) is not None:
            self._hook(loss, "call", self._call_loss)
        for metric in leaf_metrics(model):
            self._hook(metric, "update_state", update_metric)
        for optimizer in optimizers_of(model):
            self._hook(optimizer, "apply", apply_gradients)
            self._hook(optimizer, "scale_loss", scale_loss)
        for layer in adding_layers(model):
            self._hook(layer, "add_loss", add_loss)
        self._is_checked = {name: must_check(model, name) for name in ("train_step", "test_step")}
        if any(self._is_checked.values()):
            for layer in layers_of(model):
                self._hook(layer, REGULARIZATION_LOSSES, _regularization_losses)
        self._drifting = list(drifting_variables(model, self._sync_batch_norm))

    def release(self) -> None:
        unbind(self._model, "get_metrics_result")
        for target, name in self._hooked:
            unbind(target, name)
        for layer in batch_norms(self._model):
            restore_moments(layer)
        if self._kernels is not None:
            self._kernels.leave_kernels(self._model)

    def must_learn(self, name: str) -> bool:
        """Whether it is still unknown what the losses of a step are, as compiled now."""
        if not self._is_checked[name]:
            return False
        known, parts = self._kinds.get(name, ([], None))[0], _compiled_parts(self._model)
        return len(known) != len(parts) or any(map(operator.is_not, known, parts))

    def learn(self, name: str, kinds: LossKinds) -> None:
        """Take over what the losses of a step are."""
        if self.must_learn(name) or kinds != self.kinds(name):
            self._kinds[name] = (_compiled_parts(self._model), kinds)
            self._known.pop(name, None)

    def kinds(self, name: str) -> LossKinds | None:
        """What the losses of a step are; None where all are means."""
        is_known = self._is_checked.get(name, False) and name in self._kinds
        return self._kinds[name][1] if is_known else None

    def run(self, name: str, data: Any) -> Any:
        """Run the class's own `train_step` or `test_step` on one replica's rows."""
        replica = self._current()
        assert replica is not None
        if replica.state.trial is None and (kinds := self.kinds(name)) is not None:
            if name not in self._known:  # It looks through all layers.
                self._known[name] = KnownKinds(self._model, kinds)
            replica.state.kinds = self._known[name]
        start_metrics(leaf_metrics(self._model), replica.state)
        logs = original(self._model, name)(data)
        logs = self._global_logs(replica, logs)
        if name == "train_step" and self._drifting:
            means = replica.all_reduce([v.value * replica.share for v in self._drifting])
            for variable, mean in zip(self._drifting, means, strict=True):
                variable.assign(mean)
        return logs

    # -- hooks ---------------------------------------------------------------------------------

    def _hook(self, target: Any, name: str, function: Callable[..., Any]) -> None:
        if bind_in_step(target, name, function, self._current):
            self._hooked.append((target, name))

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
            return term(replica, plain(y_true, y_pred, sample_weight))
        gathered = [gather(replica, part) for part in (y_true, y_pred, sample_weight)]
        replica.state.replicated_metrics.update(id(metric) for metric in compile_loss.metrics)
        loss = term(replica, replica.with_global_gradient(plain(*gathered)))
        replica.follow_changes(sample_weight, gathered[2])
        return loss

    def _get_metrics_result(self) -> Any:
        replica = self._current()
        if replica is not None:
            reduce_metrics(replica)
        results = own_metrics_result(self._model)
        if replica is not None:
            replica.state.results.update(results)
        return results

    def _global_logs(self, replica: Replica, logs: Any) -> Any:
        """The logs of a step, from metrics that count every replica's rows."""
        known = replica.state.results
        if replica.state.is_reduced:
            if not isinstance(logs, dict) or logs.keys() <= known.keys():
                return logs
            return {
                key: value
                if key in known or not _is_scalar(value)
                else self._reduced(replica, key, value)
                for key, value in logs.items()
            }
        # A custom train step that read its metrics itself, so before they were all-reduced.
        self._get_metrics_result()
        if not isinstance(logs, dict):
            return self._reduced(replica, "", logs)
        metrics = {metric.name: metric for metric in self._model.metrics}
        fresh = {}
        for key, value in logs.items():
            if key in known:
                fresh[key] = known[key]
            elif key in metrics:
                fresh[key] = metrics[key].result()
            else:
                fresh[key] = self._reduced(replica, key, value)
        return fresh

    def _reduced(self, replica: Replica, key: str, log: Any) -> Any:
        """What a step returned beside its metrics, of all rows."""
        state = replica.state
        if state.trial is not None:
            state.trial.logs[key] = [to_number(leaf) for leaf in keras.tree.flatten(log)]
        kind = None if state.kinds is None else state.kinds.logs.get(key)
        return keras.tree.map_structure(
            lambda leaf: mean(replica, sum_as_mean(replica, leaf, kind)), log
        )


def _regularization_losses(replica: Replica, layer: Any, plain: Callable[[], Any]) -> Any:
    return [term(replica, loss) for loss in plain()]


def _is_scalar(log: Any) -> bool:
    return getattr(log, "shape", None) == ()


def _compiled_parts(model: Any) -> list[Any]:
    return [type(model), compiled_loss(model), compiled_metrics(model), *optimizers_of(model)]
