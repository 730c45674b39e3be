"""One collective from its call to its results: negotiated, then executed by the backend."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from unisono.backends import Collectives, load_backend
from unisono.horovod import timeline
from unisono.horovod.frameworks import framework
from unisono.horovod.negotiation import CollectiveRequest, TensorSpec, executed, negotiate
from unisono.horovod.reductions import ReduceOp
from unisono.horovod.session import ProcessSet, check_member, session, world_of_session


@dataclass(frozen=True)
class Collective:
    """A collective as the program called it."""

    kind: str
    process_set: ProcessSet
    name: str = ""
    names: tuple[str, ...] = ()
    """Names of the tensors, if there are several."""
    op: ReduceOp | None = None
    root: int | None = None
    scales: tuple[float, float] = (1.0, 1.0)

    @property
    def title(self) -> str:
        return f"hvd.{self.kind}"


def as_tensor(value: Any) -> Any:
    """Any value as a tensor of the backend."""
    return value if keras.ops.is_tensor(value) else keras.ops.convert_to_tensor(value)


def run(
    collective: Collective,
    tensors: Sequence[Any],
    *,
    splits: Sequence[int] | None = None,
    note: Any = None,
) -> tuple[list[Any], list[Any]]:
    """Execute a collective with eager tensors: its results, and every process' note."""
    process_set = check_member(collective.process_set)
    request = _request(collective, tensors, splits)
    agreement = negotiate(request, process_set, note)
    results = execute(agreement.request, process_set, tensors, splits)
    return results, agreement.notes


def execute(
    request: CollectiveRequest,
    process_set: ProcessSet,
    tensors: Sequence[Any],
    splits: Sequence[int] | None = None,
) -> list[Any]:
    """Execute an agreed request with the backend's collectives."""
    begin = time.time()
    collectives = _collectives(process_set)
    results: list[Any]
    if request.kind == "allreduce":
        results = _allreduce(collectives, request, tensors)
    elif request.kind == "allgather":
        results = [_join_rows(collectives.all_gather(tensor)) for tensor in tensors]
    elif request.kind == "broadcast":
        assert request.root is not None
        results = list(collectives.broadcast(tensors, process_set.ranks.index(request.root)))
    elif request.kind == "reducescatter":
        results = [_reducescatter(collectives, request, tensor) for tensor in tensors]
    elif request.kind == "alltoall":
        assert splits is not None
        rows, received = collectives.all_to_all(tensors[0], splits)
        results = [rows, keras.ops.convert_to_tensor(np.array(received, "int32"))]
    else:
        results = []
    if timeline.is_recording():
        framework().wait(results)
    executed(process_set, request, (begin, time.time()))
    return results


def execute_with_zeros(request: CollectiveRequest, process_set: ProcessSet) -> None:
    """Contribute zeros to the others' collective, from a process that has joined."""
    zeros = [keras.ops.zeros(each.shape, each.dtype) for each in request.tensors]
    execute(request, process_set, zeros)


def _request(
    collective: Collective, tensors: Sequence[Any], splits: Sequence[int] | None
) -> CollectiveRequest:
    names = collective.names or (collective.name,) * len(tensors)
    specs = tuple(
        TensorSpec(name, keras.backend.standardize_dtype(tensor.dtype), tuple(tensor.shape))
        for name, tensor in zip(names, tensors, strict=True)
    )
    return CollectiveRequest(
        collective.kind,
        collective.name,
        specs,
        "" if collective.op is None else collective.op.name,
        collective.root,
        collective.scales,
        _problem(collective, specs, splits),
    )


def _problem(
    collective: Collective, specs: Sequence[TensorSpec], splits: Sequence[int] | None
) -> str:
    """What is wrong with this process' arguments, which is reported in every process."""
    ranks = collective.process_set.ranks
    if collective.root is not None and collective.root not in ranks:
        return f"root_rank {collective.root} is not among the ranks {ranks}."
    if splits is not None and specs[0].shape:
        rows = specs[0].shape[0]
        if len(splits) != len(ranks) or sum(splits) != rows or any(part < 0 for part in splits):
            return (
                f"splits {list(splits)} do not divide {rows} rows among {len(ranks)} processes. "
                "Give one number of rows for each process."
            )
    return ""


def _collectives(process_set: ProcessSet) -> Collectives:
    """The backend's collectives among the processes of a set."""
    if world_of_session() is None or len(process_set.ranks) == 1:
        return Alone()
    is_everyone = len(process_set.ranks) == session().size
    backend = load_backend(keras.backend.backend())
    return backend.collectives(None if is_everyone else process_set.ranks)


def _allreduce(
    collectives: Collectives, request: CollectiveRequest, tensors: Sequence[Any]
) -> list[Any]:
    packed, unpack = framework().pack(tensors)
    before, op = request.scales[0], _sum_op(request)
    results = collectives.all_reduce([scale(tensor, before) for tensor in packed], op)
    return list(unpack([_finish(result, request, collectives.size) for result in results]))


def _reducescatter(collectives: Collectives, request: CollectiveRequest, tensor: Any) -> Any:
    result = collectives.reduce_scatter(scale(tensor, request.scales[0]), _sum_op(request))
    return _finish(result, request, collectives.size)


def _sum_op(request: CollectiveRequest) -> str:
    return "sum" if request.op == "Average" else request.op.lower()


def _finish(result: Any, request: CollectiveRequest, size: int) -> Any:
    return scale(divide(result, size) if request.op == "Average" else result, request.scales[1])


def scale(tensor: Any, factor: float) -> Any:
    """A tensor times a number, in its own data type, computed as Horovod does.

    Half precision is scaled in float32, integers in float64 and then truncated.
    """
    if factor == 1.0:
        return tensor
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if keras.backend.is_float_dtype(dtype):
        wide = "float32" if dtype in ("float16", "bfloat16") else dtype
        product = keras.ops.multiply(keras.ops.cast(tensor, wide), keras.ops.cast(factor, wide))
        return keras.ops.cast(product, dtype)
    return framework().scale_integers(tensor, factor, dtype)


def divide(tensor: Any, count: int) -> Any:
    """The average of a sum over `count` processes, in its own data type."""
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if count == 1 or dtype == "bool":
        return tensor
    if keras.backend.is_float_dtype(dtype):
        return keras.ops.divide(tensor, keras.ops.cast(count, dtype))
    whole = keras.ops.cast(count, dtype)
    if dtype.startswith("u"):
        return keras.ops.floor_divide(tensor, whole)
    # Rounded towards zero, as Horovod does.
    return keras.ops.sign(tensor) * keras.ops.floor_divide(keras.ops.abs(tensor), whole)


def _join_rows(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else keras.ops.concatenate(parts, axis=0)


class Alone:
    """The collectives of a single process (see backends.base.Collectives)."""

    rank = 0
    size = 1

    def all_reduce(self, tensors: Sequence[Any], op: str) -> list[Any]:
        return list(tensors)

    def all_gather(self, tensor: Any) -> list[Any]:
        return [tensor]

    def broadcast(self, tensors: Sequence[Any], root: int) -> list[Any]:
        return list(tensors)

    def reduce_scatter(self, tensor: Any, op: str) -> Any:
        return tensor

    def all_to_all(self, tensor: Any, splits: Sequence[int]) -> tuple[Any, list[int]]:
        return tensor, list(splits)

    def barrier(self) -> None:
        return
