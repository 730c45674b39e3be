"""One collective from the call of a program to its results: agreed on, then done by the engine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from unisono.backends import Collectives, load_backend
from unisono.horovod import timeline
from unisono.horovod.alone import Alone
from unisono.horovod.negotiation import executed, negotiate
from unisono.horovod.process_sets import ProcessSet, check_member
from unisono.horovod.reductions import ReduceOp
from unisono.horovod.requests import Request, TensorSpec
from unisono.horovod.session import session, world_of_session


@dataclass(frozen=True)
class Collective:
    """A collective that a program has called."""

    kind: str
    process_set: ProcessSet
    name: str = ""
    names: tuple[str, ...] = ()
    """Of the tensors, where there are several."""
    op: ReduceOp | None = None
    root: int | None = None
    scales: tuple[float, float] = (1.0, 1.0)

    @property
    def title(self) -> str:
        return f"hvd.{self.kind}"


def as_tensor(value: Any) -> Any:
    """A tensor of the backend, of anything that can be one."""
    return value if keras.ops.is_tensor(value) else keras.ops.convert_to_tensor(value)


def run(
    collective: Collective,
    tensors: Sequence[Any],
    *,
    splits: Sequence[int] | None = None,
    note: Any = None,
) -> tuple[list[Any], list[Any]]:
    """Do a collective with eager tensors: its results, and every process' note."""
    process_set = check_member(collective.process_set)
    request = _request(collective, tensors, splits)
    agreement = negotiate(request, process_set, note)
    results = take_part(agreement.request, process_set, tensors, splits)
    return results, agreement.notes


def take_part(
    request: Request,
    process_set: ProcessSet,
    tensors: Sequence[Any],
    splits: Sequence[int] | None = None,
) -> list[Any]:
    """Do what was agreed on with the engine's collectives."""
    begin = time.time()
    engine = _engine(process_set)
    results: list[Any]
    if request.kind == "allreduce":
        results = _allreduce(engine, request, tensors)
    elif request.kind == "allgather":
        results = [_join_rows(engine.all_gather(tensor)) for tensor in tensors]
    elif request.kind == "broadcast":
        assert request.root is not None
        results = list(engine.broadcast(tensors, process_set.ranks.index(request.root)))
    elif request.kind == "reducescatter":
        results = [_reducescatter(engine, request, tensor) for tensor in tensors]
    elif request.kind == "alltoall":
        assert splits is not None
        rows, received = engine.all_to_all(tensors[0], splits)
        results = [rows, keras.ops.convert_to_tensor(np.array(received, "int32"))]
    else:
        results = []
    if timeline.is_recording():
        _wait(results)
    executed(process_set, request, (begin, time.time()))
    return results


def take_part_with_zeros(request: Request, process_set: ProcessSet) -> None:
    """What a process that has joined gives to the collectives of the others."""
    zeros = [keras.ops.zeros(each.shape, each.dtype) for each in request.tensors]
    take_part(request, process_set, zeros)


def _request(
    collective: Collective, tensors: Sequence[Any], splits: Sequence[int] | None
) -> Request:
    names = collective.names or (collective.name,) * len(tensors)
    specs = tuple(
        TensorSpec(name, keras.backend.standardize_dtype(tensor.dtype), tuple(tensor.shape))
        for name, tensor in zip(names, tensors, strict=True)
    )
    return Request(
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
    """What is wrong with a call in this process alone: the others must hear of it too."""
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


def _engine(process_set: ProcessSet) -> Collectives:
    """The backend's collectives among the processes of a set."""
    if world_of_session() is None or len(process_set.ranks) == 1:
        return Alone()
    engine = load_backend(keras.backend.backend())
    everyone = len(process_set.ranks) == session().size
    return engine.collectives(None if everyone else process_set.ranks)


def _allreduce(engine: Collectives, request: Request, tensors: Sequence[Any]) -> list[Any]:
    if keras.backend.backend() != "jax" or len(tensors) == 1:
        return _reduce(engine, request, tensors)
    from unisono.horovod.jax_packing import pack, unpack

    return unpack(_reduce(engine, request, pack(tensors)), tensors)


def _reduce(engine: Collectives, request: Request, tensors: Sequence[Any]) -> list[Any]:
    before, after = request.scales
    op = "sum" if request.op == "Average" else request.op.lower()
    results = engine.all_reduce([scale(tensor, before) for tensor in tensors], op)
    if request.op == "Average":
        results = [divide(result, engine.size) for result in results]
    return [scale(result, after) for result in results]


def _reducescatter(engine: Collectives, request: Request, tensor: Any) -> Any:
    before, after = request.scales
    op = "sum" if request.op == "Average" else request.op.lower()
    result = engine.reduce_scatter(scale(tensor, before), op)
    if request.op == "Average":
        result = divide(result, engine.size)
    return scale(result, after)


def scale(tensor: Any, factor: float) -> Any:
    """A tensor times a number, in its own type, computed as Horovod does.

    Half precision is scaled in float32, integers in float64 and then truncated.
    """
    if factor == 1.0:
        return tensor
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if keras.backend.is_float_dtype(dtype):
        wide = "float32" if dtype in ("float16", "bfloat16") else dtype
        product = keras.ops.multiply(keras.ops.cast(tensor, wide), keras.ops.cast(factor, wide))
        return keras.ops.cast(product, dtype)
    if keras.backend.backend() == "jax":  # It has no float64 unless the whole process has.
        numbers = keras.ops.convert_to_numpy(tensor).astype("float64")
        return keras.ops.convert_to_tensor((numbers * factor).astype(dtype))
    return keras.ops.cast(keras.ops.multiply(keras.ops.cast(tensor, "float64"), factor), dtype)


def divide(tensor: Any, count: int) -> Any:
    """A sum of so many as their average, in its own type."""
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if count == 1 or dtype == "bool":
        return tensor
    if keras.backend.is_float_dtype(dtype):
        return keras.ops.divide(tensor, keras.ops.cast(count, dtype))
    whole = keras.ops.cast(count, dtype)
    if dtype.startswith("u"):
        return keras.ops.floor_divide(tensor, whole)
    # Towards zero, as Horovod does.
    return keras.ops.sign(tensor) * keras.ops.floor_divide(keras.ops.abs(tensor), whole)


def _join_rows(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else keras.ops.concatenate(parts, axis=0)


def _wait(results: Sequence[Any]) -> None:
    """Until results are there, so that a timeline shows how long they took."""
    for result in results:
        wait: Callable[[], Any] | None = getattr(result, "block_until_ready", None)
        if wait is not None:
            wait()
