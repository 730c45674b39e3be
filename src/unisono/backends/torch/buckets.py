"""Gradients that are all-reduced in buckets while the backward pass still runs.

Autograd calls a hook when the gradient of a variable is complete. Gradients are copied into
buckets, the last layers' first, and a bucket that is complete is summed over the replicas while
earlier layers are still computed; the optimizer is given views of the buckets, which are reused.
This serves Keras' own `train_step`, in which nothing comes between one backward pass, of a loss
that is weighted already, and `optimizer.apply`. Whatever else a program does, its gradients are
reduced when they reach an optimizer: see replica.reduce_gradients.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import torch

from unisono.backends.torch.process_group import Group, PendingReduce
from unisono.keras_internals import value_of

BUCKET_BYTES = 25 * 2**20
# Small, so that the first sum is under way early, as DistributedDataParallel has it.
FIRST_BUCKET_BYTES = 2**20

ReduceNow = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
"""Sums gradients, given with their variables, over the replicas."""


class GradientBuckets:
    """The buckets of one model, for the variables that its last step has updated.

    Every replica updates the same variables in a step, so all have equal buckets.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = weakref.ref(model)
        self._variables: list[Any] = []
        self._buckets: list[_Bucket] = []
        self._handles: list[Any] = []
        self._backward: _Backward | None = None

    def begin_step(self, group: Group, is_weighted: Callable[[], bool]) -> None:
        """`is_weighted()`: whether the step has come to minimize its loss, weighted by share."""
        if self._buckets:
            self._backward = _Backward(self._buckets, group, is_weighted)

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], reduce_now: ReduceNow
    ) -> list[Any]:
        """Sums over replicas; None where no replica has a gradient."""
        backward, self._backward = self._backward, None
        if backward is None:
            totals = reduce_now(gradients, variables)
        else:
            reduced = backward.finish()
            rest = [i for i, variable in enumerate(variables) if id(variable) not in reduced]
            others = iter(reduce_now([gradients[i] for i in rest], [variables[i] for i in rest]))
            totals = [reduced[id(v)] if id(v) in reduced else next(others) for v in variables]
        if [*map(id, variables)] != [*map(id, self._variables)]:
            self._plan(variables)
        return totals

    def end_step(self) -> None:
        """Where a step had no update, what it has begun to reduce is dropped."""
        backward, self._backward = self._backward, None
        if backward is not None:
            backward.finish()

    def clear(self) -> None:
        """Forget all variables, and hook them no more."""
        for handle in self._handles:
            handle.remove()
        self._variables, self._buckets, self._handles = [], [], []
        self._backward = None

    def _plan(self, variables: Sequence[Any]) -> None:
        self.clear()
        self._variables = list(variables)
        model = self._model()
        if model is None or not _can_hook(model, variables):
            return
        self._buckets = list(_make_buckets(variables))
        # A variable keeps its hooks, which must not keep the variables of a model in turn.
        myself = weakref.ref(self)
        for bucket in self._buckets:
            for i, parameter in enumerate(bucket.parameters):
                hook = _GradientHook(myself, weakref.ref(bucket), i)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def on_gradient(self, bucket: "_Bucket", i: int) -> None:
        if self._backward is not None:
            self._backward.on_gradient(bucket, i)


def _can_hook(model: keras.Model, variables: Sequence[Any]) -> bool:
    """Whether a step of a model runs one backward pass into gradients that it has cleared."""
    if type(model).train_step is not keras.Model.train_step:
        return False
    if type(model).zero_grad is not torch.nn.Module.zero_grad:
        return False
    cleared = {id(parameter) for parameter in model.parameters()}
    values = [value_of(variable) for variable in variables]
    are_cleared = all(id(value) in cleared for value in values)
    # One that is held twice would be in two buckets.
    return are_cleared and len({*map(id, values)}) == len(values) > 0


class _GradientHook:
    def __init__(
        self,
        buckets: "weakref.ref[GradientBuckets]",
        bucket: "weakref.ref[_Bucket]",
        i: int,
    ) -> None:
        self._buckets, self._bucket, self._i = buckets, bucket, i

    def __call__(self, parameter: torch.Tensor) -> None:
        buckets, bucket = self._buckets(), self._bucket()
        if buckets is not None and bucket is not None:
            buckets.on_gradient(bucket, self._i)


class _Bucket:
    """Some variables of one data type, and one tensor for all of their gradients."""

    def __init__(self, variables: list[Any], num_flags: int) -> None:
        """`num_flags`: further numbers in the tensor, which tell what is missing."""
        self.variables = variables
        self.parameters: list[Any] = [value_of(variable) for variable in variables]
        sizes = [parameter.numel() for parameter in self.parameters]
        self.flat = self.parameters[0].detach().new_empty(sum(sizes) + num_flags)
        *parts, self.flags = self.flat.split([*sizes, num_flags])
        self.views = [
            part.view(parameter.shape)
            for part, parameter in zip(parts, self.parameters, strict=True)
        ]

    def fill(self, present: set[int], sparse: set[int]) -> None:
        """Take the gradients out of the parameters; notes which of them are sparse."""
        places = sorted(present)
        gradients = [self.parameters[i].grad for i in places]
        sparse |= {i for i, found in zip(places, gradients, strict=True) if found.is_sparse}
        with torch.no_grad():
            if places:
                torch._foreach_copy_(
                    [self.views[i] for i in places], [found.to_dense() for found in gradients]
                )
            if missing := [view for i, view in enumerate(self.views) if i not in present]:
                torch._foreach_zero_(missing)
        for i in places:
            self.parameters[i].grad = None


class _Backward:
    """The backward pass of one step: which gradients it has completed, and the sums under way."""

    def __init__(
        self, buckets: list[_Bucket], group: Group, is_weighted: Callable[[], bool]
    ) -> None:
        self._buckets = buckets
        self._group = group
        self._is_weighted = is_weighted
        self._present: list[set[int]] = [set() for _ in buckets]
        self._sparse: list[set[int]] = [set() for _ in buckets]
        self._pending: list[PendingReduce] = []
        self._late: list[tuple[_Bucket, int, Any]] = []
        self._numbers = {id(bucket): number for number, bucket in enumerate(buckets)}

    def on_gradient(self, bucket: _Bucket, i: int) -> None:
        if not self._is_weighted():
            return  # Of a backward pass that a layer runs for itself.
        number = self._numbers[id(bucket)]
        if number < len(self._pending):
            # A second part, of a backward pass inside the backward pass.
            parameter = bucket.parameters[i]
            self._late.append((bucket, i, parameter.grad))
            parameter.grad = None
            return
        self._present[number].add(i)
        while len(self._pending) < len(self._buckets) and len(
            self._present[len(self._pending)]
        ) == len(self._buckets[len(self._pending)].parameters):
            self._start_next()

    def finish(self) -> dict[int, Any]:
        """By the id of each variable: its gradient's sum over replicas, or None."""
        while len(self._pending) < len(self._buckets):
            self._start_next()
        for pending in self._pending:
            pending.wait()
        self._add_late()
        totals: dict[int, Any] = {}
        are_missing = self._missing_everywhere()
        for number, bucket in enumerate(self._buckets):
            for i, (variable, view) in enumerate(zip(bucket.variables, bucket.views, strict=True)):
                total = view.to_sparse(1) if i in self._sparse[number] else view
                totals[id(variable)] = None if id(variable) in are_missing else total
                bucket.parameters[i].grad = totals[id(variable)]
        return totals

    def _start_next(self) -> None:
        number = len(self._pending)
        bucket = self._buckets[number]
        bucket.fill(self._present[number], self._sparse[number])
        if bucket is self._buckets[-1]:
            # Numbers of a kernel launch: a list of flags would be copied while the host waits.
            bucket.flags.zero_()
            for place in self._missing_here():
                bucket.flags[place].fill_(1.0)
        self._pending.append(self._group.start_all_reduce(bucket.flat))

    def _missing_here(self) -> list[int]:
        """Places of variables without a gradient, counted through all buckets."""
        found, start = [], 0
        for bucket, present in zip(self._buckets, self._present, strict=True):
            found += [start + i for i in range(len(bucket.views)) if i not in present]
            start += len(bucket.views)
        return found

    def _missing_everywhere(self) -> set[int]:
        """Ids of variables that have a gradient on no replica."""
        missing = self._missing_here()
        if not missing:
            return set()
        counts = self._buckets[-1].flags.tolist()
        ids = [id(variable) for bucket in self._buckets for variable in bucket.variables]
        return {ids[place] for place in missing if counts[place] == self._group.size}

    def _add_late(self) -> None:
        if self._late:
            sums = self._group.all_reduce([found.to_dense() for *_, found in self._late])
            for (bucket, i, _), total in zip(self._late, sums, strict=True):
                bucket.views[i].add_(total)


def _make_buckets(variables: Sequence[Any]) -> Iterator[_Bucket]:
    groups = list(_group_variables(variables))
    for group in groups:
        yield _Bucket(group, len(variables) if group is groups[-1] else 0)


def _group_variables(variables: Sequence[Any]) -> Iterator[list[Any]]:
    """Variables in the order in which backward comes to them, by type, in pieces of a size."""
    limit = FIRST_BUCKET_BYTES
    filling: dict[Any, list[Any]] = {}
    num_bytes: dict[Any, int] = {}
    for variable in reversed(variables):
        value = value_of(variable)
        kind = (value.dtype, value.device)
        filling.setdefault(kind, []).append(variable)
        num_bytes[kind] = num_bytes.get(kind, 0) + value.nbytes
        if num_bytes[kind] >= limit:
            yield filling.pop(kind)
            del num_bytes[kind]
            limit = BUCKET_BYTES
    yield from filling.values()
