"""`DistributedOptimizer`: an optimizer that applies the gradients of all processes.

The given optimizer keeps its class, configuration and state; `apply` is bound on the instance. So
a saved model is a plain Keras file, which loads without unisono.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from unisono.hooks import bind, original
from unisono.horovod.collectives import gather_all, reduce_all
from unisono.horovod.execution import Collective
from unisono.horovod.frameworks import framework
from unisono.horovod.reductions import Average, Compression, Compressor, ReduceOp, Sum, resolve
from unisono.horovod.session import ProcessSet, global_process_set, session, world_of_session
from unisono.keras_internals import optimized_variables

REDUCTION = "_unisono_horovod"
"""The attribute of an optimizer that holds its reduction."""


@dataclass(frozen=True)
class ReductionSettings:
    """The arguments of `DistributedOptimizer`."""

    name: str
    op: ReduceOp = Average
    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    predivide_factor: float = 1.0
    num_passes: int = 1
    average_passes: bool = False
    groups: int | Sequence[Sequence[Any]] | None = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True


@dataclass
class GradientReduction:
    """Reduces the gradients of one optimizer over the processes."""

    settings: ReductionSettings
    local: set[int] = field(default_factory=set)
    """Variables (by `id`) whose gradients are not reduced."""
    is_plain: bool = False
    """Whether the optimizer applies the given gradients as they are: they are reduced already."""
    captured: list[Any] | None = None
    """Receives the gradients while JAX traces a training step."""
    passes: Any = None
    """Sums several backward passes (frameworks.Passes), if there are several in a step."""

    def reduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients reduced over all processes; None stays None."""
        members = self.settings.process_set
        if world_of_session() is None or not members.included() or len(members.ranks) == 1:
            return list(grads)
        results = list(grads)
        shared = [
            place
            for place, grad in enumerate(grads)
            if grad is not None and id(variables[place]) not in self.local
        ]
        for place in shared:
            if self.settings.sparse_as_dense:
                results[place] = framework().to_dense(results[place])
        names = [_name(variable, place) for place, variable in enumerate(variables)]
        for group in self._groups(shared, variables):
            self._reduce_dense(
                [p for p in group if not framework().is_sparse(results[p])], results, names
            )
        self._reduce_sparse(
            [p for p in shared if framework().is_sparse(results[p])], results, names
        )
        self._scale_local(set(range(len(results))) - set(shared), results)
        return results

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Within this context the optimizer applies gradients as they are."""
        before, self.is_plain = self.is_plain, True
        try:
            yield
        finally:
            self.is_plain = before

    def _reduce_dense(self, places: list[int], results: list[Any], names: list[str]) -> None:
        settings = self.settings
        scales = (1 / settings.predivide_factor, settings.predivide_factor)
        collective = Collective(
            "allreduce",
            settings.process_set,
            names=tuple(names[place] for place in places),
            op=settings.op,
            scales=scales,
        )
        reduced = reduce_all(collective, [results[p] for p in places], settings.compression)
        for place, result in zip(places, reduced, strict=True):
            results[place] = result

    def _reduce_sparse(self, places: list[int], results: list[Any], names: list[str]) -> None:
        """Gather the rows of all processes; the optimizer sums rows with the same index."""
        parts = [part for p in places for part in (results[p].values, results[p].indices)]
        gathered = gather_all(Collective("allgather", self.settings.process_set), parts)
        count = len(self.settings.process_set.ranks) if self.settings.op is Average else 1
        for number, place in enumerate(places):
            values, indices = gathered[2 * number : 2 * number + 2]
            results[place] = framework().with_rows(results[place], values / count, indices)

    def _groups(self, places: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """Which gradients are reduced in one collective: all, unless `groups` says otherwise."""
        groups = self.settings.groups
        if groups is None:
            return [places]
        if isinstance(groups, int):
            each, more = divmod(len(places), groups)
            ends = [(i + 1) * each + min(i + 1, more) for i in range(groups)]
            return [places[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        left = {id(variables[place]): place for place in places}
        found = [
            [left.pop(id(variable)) for variable in group if id(variable) in left]
            for group in groups
        ]
        return [*found, *([place] for place in left.values())]

    def _scale_local(self, places: set[int], results: list[Any]) -> None:
        if not self.settings.scale_local_gradients:
            return
        count = len(self.settings.process_set.ranks)
        for place in places:
            grad = results[place]
            if framework().is_sparse(grad):
                results[place] = framework().with_rows(grad, grad.values / count, grad.indices)
            elif grad is not None:
                results[place] = grad / count


def _name(variable: Any, place: int) -> str:
    return str(getattr(variable, "path", None) or f"gradient {place}")


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
    """Make an optimizer apply the average of all processes' gradients; returns the optimizer.

    Each process trains on its own data. All processes have the same weights after a step if they
    had the same before it: see `callbacks.BroadcastGlobalVariablesCallback`. With
    `backward_passes_per_step=n`, gradients of n batches are summed before they are reduced and
    applied, and divided by n with `average_aggregated_gradients`. `device_dense` and
    `device_sparse` are accepted and ignored: tensors are reduced where they are.

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
    """`DistributedOptimizer` that does not reduce the gradients of some layers.

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
        reduction.passes = framework().make_passes(settings)
    vars(optimizer)[REDUCTION] = reduction
    bind(optimizer, "apply", _applying(optimizer, reduction))
    bind(optimizer, "register_local_var", lambda variable: reduction.local.add(id(variable)))
    framework().bind_optimizer(optimizer, reduction)
    return optimizer


def _applying(optimizer: Any, reduction: GradientReduction) -> Callable[..., Any]:
    def apply(grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> Any:
        given = list(grads)
        variables = None if trainable_variables is None else list(trainable_variables)
        plain = original(optimizer, "apply")
        named = optimized_variables(optimizer) if variables is None else variables
        if reduction.is_plain or len(named) != len(given):
            return plain(given, variables)  # Keras raises where the lengths differ.
        framework().check_not_traced("hvd.DistributedOptimizer", given)

        def reduce_and_apply(total: Sequence[Any]) -> None:
            plain(reduction.reduce(total, named), variables)

        if reduction.passes is None:
            reduce_and_apply(given)
        else:
            # As in Horovod, a pass that only sums gradients counts as an iteration.
            reduction.passes.run(
                given, reduce_and_apply, lambda: optimizer.iterations.assign_add(1)
            )
        return None

    return apply


def _checked_op(op: int, predivide_factor: float) -> ReduceOp:
    found = resolve(op)
    if found not in (Average, Sum):
        raise ValueError(f"Received op=hvd.{found.name}. Give hvd.Average or hvd.Sum.")
    if predivide_factor != 1.0 and found is not Average:
        raise ValueError("gradient_predivide_factor is possible only with op=hvd.Average.")
    if predivide_factor != 1.0 and framework().is_rocm_built():
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
