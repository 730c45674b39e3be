"""Several tensors in one collective, wherever a program is, with gradients where there are any.

Gradients are scaled as Horovod scales them: programs that came from there have learned to live
with it.
"""

from collections.abc import Sequence
from typing import Any

import keras

from unisono.horovod.compression import Compression, Compressor
from unisono.horovod.execution import Collective, as_tensor, run
from unisono.horovod.frameworks import run_here
from unisono.horovod.process_sets import ProcessSet
from unisono.horovod.reductions import Average, Sum


def reduce_all(
    collective: Collective, values: Sequence[Any], compression: type[Compressor] = Compression.none
) -> list[Any]:
    """Several values reduced in one collective."""
    if not values:
        return []
    packed = [compression.compress(as_tensor(value)) for value in values]

    def backward(upstream: list[Any]) -> list[Any]:
        if collective.op not in (Average, Sum):
            assert collective.op is not None
            raise NotImplementedError(f"hvd.{collective.op.name} has no gradient.")
        return reduce_all(collective, upstream)

    results = run_all(collective, [tensor for tensor, _ in packed], backward)
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, packed, strict=True)
    ]


def gather_all(collective: Collective, values: Sequence[Any]) -> list[Any]:
    """Several values gathered in one collective."""
    given = [as_tensor(value) for value in values]

    def backward(upstream: list[Any]) -> list[Any]:
        totals = reduce_all(_average_of(collective), upstream)
        return [_own_rows(total, own, collective) for total, own in zip(totals, given, strict=True)]

    return run_all(collective, given, backward, has_rows=True)


def broadcast_all(
    values: Sequence[Any],
    root_rank: int,
    names: Sequence[str],
    name: str | None,
    process_set: ProcessSet,
) -> list[Any]:
    """Several values of one process in one collective."""
    if not values:
        return []
    collective = Collective(
        "broadcast", process_set, name or "", tuple(names), None, int(root_rank)
    )
    given = [as_tensor(value) for value in values]

    def backward(upstream: list[Any]) -> list[Any]:
        totals = reduce_all(_average_of(collective), upstream)
        is_root = process_set.ranks[process_set.rank() or 0] == root_rank
        return totals if is_root else [keras.ops.zeros_like(total) for total in totals]

    return run_all(collective, given, backward)


def run_all(
    collective: Collective, tensors: list[Any], backward: Any, *, has_rows: bool = False
) -> list[Any]:
    """A collective with as many results as tensors; `has_rows`: with other numbers of rows."""
    if not tensors:
        return []

    def shapes() -> list[Any]:
        return [
            (
                keras.backend.standardize_dtype(tensor.dtype),
                (None, *tensor.shape[1:]) if has_rows and tensor.shape.rank else tensor.shape,
            )
            for tensor in tensors
        ]

    return run_here(
        collective.title,
        tensors,
        lambda given: run(collective, given)[0],
        backward,
        shapes,
    )


def _average_of(collective: Collective) -> Collective:
    return Collective("allreduce", collective.process_set, collective.name, (), Average)


def _own_rows(total: Any, own: Any, collective: Collective) -> Any:
    """The rows of a gathered tensor that this process gave."""
    members = collective.process_set
    num_rows = keras.ops.shape(own)[0]
    (counts,) = gather_all(Collective("allgather", members), [keras.ops.reshape(num_rows, (1,))])
    before = keras.ops.sum(counts[: members.rank()])
    return total[before : before + num_rows]
