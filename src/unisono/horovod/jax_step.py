"""A training step on JAX in three parts: gradients, their reduction, their application.

Collectives between processes are eager on JAX, and a step is compiled as a whole. So the step is
compiled twice: up to where it hands the gradients to the optimizer, and from there on.
"""

from typing import Any

import jax

from unisono.errors import ModelError
from unisono.hooks import bind, original
from unisono.horovod.gradients import GradientReduction
from unisono.keras_internals import jax_function


def train_in_parts(model: Any, reduction: GradientReduction) -> None:
    """Bind a training function that reduces gradients between processes."""

    def make_train_function(force: bool = False) -> None:
        if model.train_function is None or force:
            model.train_function = jax_function(model, _Step(model, reduction))

    bind(model, "make_train_function", make_train_function)


class _Step:
    """`step(state, batch)` as Keras calls it."""

    def __init__(self, model: Any, reduction: GradientReduction) -> None:
        self._model = model
        self._reduction = reduction
        self._optimizer = model.optimizer
        is_compiled = not model.run_eagerly and model.jit_compile
        self._find = jax.jit(self._find_gradients) if is_compiled else self._find_gradients
        self._apply = (
            jax.jit(self._apply_gradients, donate_argnums=(0, 1))
            if is_compiled
            else (self._apply_gradients)
        )

    def __call__(self, state: Any, data: Any) -> tuple[Any, Any]:
        from unisono.horovod.optimizer import count_stateless

        trainable, _, optimizer_variables, _ = state
        logs, non_trainable, metrics, grads = self._find(state, data)
        passes = self._reduction.passes
        total = grads if passes is None else passes.add(grads)
        if total is None:
            optimizer_variables = count_stateless(self._optimizer, optimizer_variables)
        else:
            reduced = self._reduction.reduce(total, self._model.trainable_variables)
            trainable, optimizer_variables = self._apply(trainable, optimizer_variables, reduced)
        return logs, (trainable, non_trainable, optimizer_variables, metrics)

    def _find_gradients(self, state: Any, data: Any) -> tuple[Any, Any, Any, Any]:
        captured: list[Any] = []
        self._reduction.captured = captured
        try:
            logs, (_, non_trainable, _, metrics) = self._model.train_step(state, data)
        finally:
            self._reduction.captured = None
        if len(captured) != 1:
            raise ModelError(
                f"The model's train_step called optimizer.stateless_apply {len(captured)} times. "
                "On JAX, hvd.DistributedOptimizer needs a train_step that calls it once."
            )
        return logs, non_trainable, metrics, list(captured[0])

    def _apply_gradients(self, trainable: Any, variables: Any, grads: Any) -> tuple[Any, Any]:
        plain = original(self._optimizer, "stateless_apply")
        with self._reduction.plain():
            new_trainable, new_variables = plain(variables, grads, trainable)
        return new_trainable, new_variables
