"""How a distributed optimizer makes one gradient of those of all processes."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from unisono.horovod.compression import Compression, Compressor
from unisono.horovod.execution import Collective
from unisono.horovod.frameworks import is_sparse, to_dense, with_rows
from unisono.horovod.grouped import gather_all, reduce_all
from unisono.horovod.process_sets import ProcessSet, global_process_set
from unisono.horovod.reductions import Average, ReduceOp
from unisono.horovod.session import world_of_session


@dataclass(frozen=True)
class ReductionSettings:
    """What `DistributedOptimizer` was asked for."""

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
    """The gradients of one optimizer, on their way from this process to all and back."""

    settings: ReductionSettings
    local: set[int] = field(default_factory=set)
    """Variables (by `id`) whose gradients stay in this process."""
    is_plain: bool = False
    """Whether the optimizer just applies what it is given, which is reduced already."""
    captured: list[Any] | None = None
    """Takes the gradients while a training step of JAX is traced."""
    passes: Any = None
    """Adds up several backward passes, where that was asked for."""

    def reduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Gradients of all processes in place of this one's; None stays None."""
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
                results[place] = to_dense(results[place])
        names = [_name(variable, place) for place, variable in enumerate(variables)]
        for group in self._groups(shared, variables):
            self._reduce_dense([p for p in group if not is_sparse(results[p])], results, names)
        self._reduce_sparse([p for p in shared if is_sparse(results[p])], results, names)
        self._scale_local(set(range(len(results))) - set(shared), results)
        return results

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """While it lasts, the optimizer applies gradients as they are."""
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
        """Rows of all processes; where they meet, an optimizer adds them up."""
        parts = [part for p in places for part in (results[p].values, results[p].indices)]
        gathered = gather_all(Collective("allgather", self.settings.process_set), parts)
        count = len(self.settings.process_set.ranks) if self.settings.op is Average else 1
        for number, place in enumerate(places):
            values, indices = gathered[2 * number : 2 * number + 2]
            results[place] = with_rows(results[place], values / count, indices)

    def _groups(self, places: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """Which gradients travel together: all, unless the program wants it otherwise."""
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
            if is_sparse(grad):
                results[place] = with_rows(grad, grad.values / count, grad.indices)
            elif grad is not None:
                results[place] = grad / count


class Passes:
    """Adds up the gradients of several backward passes, where Python runs at each of them."""

    def __init__(self, num_passes: int, *, average: bool) -> None:
        self._num_passes = num_passes
        self._average = average
        self._count = 0
        self._sums: list[Any] = []

    def add(self, grads: Sequence[Any]) -> list[Any] | None:
        """The sum, at every last pass; None at the others."""
        if self._count == 0:
            self._sums = [None if grad is None else keras.ops.copy(grad) for grad in grads]
        else:
            self._sums = [_plus(one, other) for one, other in zip(self._sums, grads, strict=True)]
        self._count += 1
        if self._count < self._num_passes:
            return None
        sums, self._sums, self._count = self._sums, [], 0
        return [self.averaged(total) for total in sums]

    def averaged(self, total: Any) -> Any:
        return total / self._num_passes if self._average and total is not None else total


def _plus(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _name(variable: Any, place: int) -> str:
    return str(getattr(variable, "path", None) or f"gradient {place}")
