"""`DistributedOptimizer`: an optimizer that applies the gradients of all processes.

The optimizer that is given keeps its class, its configuration and its state; `apply` is bound to
the one instance. So a saved model is a plain file of Keras, which loads without unisono.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras

from unisono.hooks import bind, original
from unisono.horovod.builds import rocm_built
from unisono.horovod.compression import Compression, Compressor
from unisono.horovod.frameworks import check_not_traced
from unisono.horovod.gradients import GradientReduction, Passes, ReductionSettings
from unisono.horovod.models import REDUCTION
from unisono.horovod.process_sets import ProcessSet, global_process_set
from unisono.horovod.reductions import Average, ReduceOp, Sum, resolve
from unisono.horovod.session import session


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Let an optimizer apply the average of all processes' gradients; returns the optimizer.

    Each process trains on data of its own, and after each step all have the same weights if they
    had them before: see `callbacks.BroadcastGlobalVariablesCallback`. With
    `backward_passes_per_step=n` gradients of n batches are added up before they are reduced and
    applied, divided by n with `average_aggregated_gradients`. `device_dense` and `device_sparse`
    are accepted: tensors are reduced where they are.

    >>> import keras, unisono.horovod as hvd
    >>> hvd.init()
    >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * hvd.size()))
    >>> type(optimizer).__name__
    'SGD'
    """
    session()
    if num_groups:
        warnings.warn("num_groups is deprecated; write groups.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    settings = ReductionSettings(
        name=name or f"Distributed{type(optimizer).__name__}",
        op=_checked_op(op, gradient_predivide_factor),
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        predivide_factor=gradient_predivide_factor,
        num_passes=_checked_passes(backward_passes_per_step, optimizer),
        average_passes=average_aggregated_gradients,
        groups=_checked_groups(groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    return distribute(optimizer, GradientReduction(settings))


def PartialDistributedOptimizer(
    optimizer: Any, *args: Any, local_layers: Any = None, **kwargs: Any
) -> Any:
    """`DistributedOptimizer` that leaves the gradients of some layers in their process.

    >>> import keras, unisono.horovod as hvd
    >>> hvd.init()
    >>> layer = keras.layers.Dense(1)
    >>> layer.build((None, 2))
    >>> optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=[layer])
    """
    layers = [local_layers] if isinstance(local_layers, keras.Layer) else list(local_layers or ())
    for layer in layers:
        if not isinstance(layer, keras.Layer):
            raise ValueError(f"Received a {type(layer).__name__} in local_layers. Give layers.")
    distributed = DistributedOptimizer(optimizer, *args, **kwargs)
    for layer in layers:
        for variable in layer.trainable_weights:
            distributed.register_local_var(variable)
    return distributed


def distribute(optimizer: Any, reduction: GradientReduction) -> Any:
    """Bind a reduction to an optimizer."""
    settings = reduction.settings
    if settings.num_passes > 1:
        reduction.passes = _passes(settings)
    vars(optimizer)[REDUCTION] = reduction
    bind(optimizer, "apply", _applying(optimizer, reduction))
    bind(optimizer, "register_local_var", lambda variable: reduction.local.add(id(variable)))
    if keras.backend.backend() == "jax":
        bind(optimizer, "stateless_apply", _applying_stateless(optimizer, reduction))
    return optimizer


def _applying(optimizer: Any, reduction: GradientReduction) -> Callable[..., Any]:
    def apply(grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> Any:
        given = list(grads)
        variables = None if trainable_variables is None else list(trainable_variables)
        plain = original(optimizer, "apply")
        named = optimizer._trainable_variables if variables is None else variables
        if reduction.is_plain or len(named) != len(given):
            return plain(given, variables)  # Which says what is wrong, where something is.
        if keras.backend.backend() == "jax":
            check_not_traced("hvd.DistributedOptimizer", given)

        def reduce_and_apply(total: Sequence[Any]) -> None:
            plain(reduction.reduce(total, named), variables)

        if reduction.passes is None:
            reduce_and_apply(given)
        elif keras.backend.backend() == "tensorflow":
            reduction.passes.run(given, reduce_and_apply, lambda: _count(optimizer))
        else:
            total = reduction.passes.add(given)
            _count(optimizer) if total is None else reduce_and_apply(total)
        return None

    return apply


def _applying_stateless(optimizer: Any, reduction: GradientReduction) -> Callable[..., Any]:
    def stateless_apply(optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        plain = original(optimizer, "stateless_apply")
        if reduction.is_plain:
            return plain(optimizer_variables, grads, trainable_variables)
        if reduction.captured is not None:
            reduction.captured.append(grads)
            return trainable_variables, optimizer_variables
        check_not_traced("hvd.DistributedOptimizer", grads)
        if reduction.passes is not None:
            grads = reduction.passes.add(grads)
            if grads is None:
                return trainable_variables, count_stateless(optimizer, optimizer_variables)
        reduced = reduction.reduce(grads, optimizer._trainable_variables)
        with reduction.plain():
            return plain(optimizer_variables, reduced, trainable_variables)

    return stateless_apply


def count_stateless(optimizer: Any, optimizer_variables: Any) -> list[Any]:
    """The variables of an optimizer after a pass that applied nothing."""
    mapping = list(zip(optimizer.variables, optimizer_variables, strict=True))
    with keras.StatelessScope(state_mapping=mapping) as scope:
        _count(optimizer)
    return [scope.get_current_value(variable) for variable in optimizer.variables]


def _count(optimizer: Any) -> None:
    # As in Horovod, a pass that only adds up counts as an iteration, for schedules and the like.
    optimizer.iterations.assign_add(1)


def _passes(settings: ReductionSettings) -> Any:
    if keras.backend.backend() == "tensorflow":
        from unisono.horovod.tensorflow_passes import GraphPasses

        return GraphPasses(settings)
    return Passes(settings.num_passes, average=settings.average_passes)


def _checked_op(op: int, predivide_factor: float) -> ReduceOp:
    found = resolve(op)
    if found not in (Average, Sum):
        raise ValueError(f"Received op=hvd.{found.name}. Give hvd.Average or hvd.Sum.")
    if predivide_factor != 1.0 and found is not Average:
        raise ValueError("gradient_predivide_factor is possible with op=hvd.Average alone.")
    if predivide_factor != 1.0 and rocm_built():
        raise ValueError("gradient_predivide_factor is not possible with ROCm.")
    return found


def _checked_passes(count: int, optimizer: Any) -> int:
    if count < 1:
        raise ValueError(f"Received backward_passes_per_step={count}. Give 1 or more.")
    if count > 1 and optimizer.gradient_accumulation_steps:
        raise ValueError(
            f"Received backward_passes_per_step={count} and an optimizer with "
            f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}. Use one."
        )
    return count


def _checked_groups(groups: Any) -> Any:
    if groups is None or isinstance(groups, list | tuple):
        return groups
    if isinstance(groups, int) and groups > 0:
        return groups
    raise ValueError(
        f"Received groups={groups!r}. Give the number of groups, or a list of lists of variables."
    )
