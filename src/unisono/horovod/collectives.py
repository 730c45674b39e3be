"""Horovod's collectives: all-reduce, all-gather, broadcast, reduce-scatter, all-to-all, join.

They take anything that Keras converts to a tensor, and return tensors of the backend. They can be
called eagerly on every backend, and inside tf.function on TensorFlow; TensorFlow and torch
differentiate through them, with gradients scaled as Horovod scales them. Every process of the set
must make the same call: if calls differ, all processes raise a DisagreementError that says how.
"""

from collections.abc import Sequence
from typing import Any

import keras

from unisono.horovod.execution import Collective, as_tensor, execute_with_zeros, run, scale
from unisono.horovod.frameworks import framework
from unisono.horovod.negotiation import JOIN, CollectiveRequest, negotiate
from unisono.horovod.reductions import Average, Compression, Compressor, ReduceOp, Sum, resolve
from unisono.horovod.session import ProcessSet, check_member, global_process_set

_SCALED = "prescale_factor and postscale_factor are not possible with IndexedSlices."


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: type[Compressor] = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The average of a value over all processes, or the reduction that `op` names.

    >>> import keras, unisono.horovod as hvd
    >>> hvd.init()
    >>> float(hvd.allreduce(3.0, op=hvd.Sum))
    3.0
    """
    reduction = resolve(op, average)
    scales = (prescale_factor, postscale_factor)
    if framework().is_sparse(value):
        return _allreduce_rows(value, name, reduction, scales, process_set)
    collective = Collective("allreduce", process_set, name or "", (), reduction, None, scales)
    return reduce_all(collective, [value], compression)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """`allreduce` of several values at once.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> [float(total) for total in hvd.grouped_allreduce([1.0, 2.0], op=hvd.Max)]
    [1.0, 2.0]
    """
    reduction = resolve(op, average)
    scales = (prescale_factor, postscale_factor)
    dense = [place for place, value in enumerate(tensors) if not framework().is_sparse(value)]
    collective = Collective("allreduce", process_set, name or "", (), reduction, None, scales)
    results = dict(
        zip(
            dense,
            reduce_all(collective, [tensors[place] for place in dense], compression),
            strict=True,
        )
    )
    for place, value in enumerate(tensors):
        if place not in results:
            results[place] = _allreduce_rows(value, name, reduction, scales, process_set)
    return [results[place] for place in range(len(tensors))]


def allgather(
    value: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The values of all processes, concatenated along the first dimension, which may differ.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.allgather([[1.0], [2.0]]).shape[0]
    2
    """
    return grouped_allgather([value], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """`allgather` of several values at once.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> len(hvd.grouped_allgather([[1.0], [2.0]]))
    2
    """
    return gather_all(Collective("allgather", process_set, name or ""), tensors)


def broadcast(
    value: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The value of one process, in all processes; `root_rank` is its rank in the run.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> float(hvd.broadcast(5.0, root_rank=0))
    5.0
    """
    return broadcast_all([value], root_rank, (), name, process_set)[0]


def reducescatter(
    value: Any,
    name: str | None = None,
    op: int | None = None,
    compression: type[Compressor] = Compression.none,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This process' shard of the rows of an `allreduce`; the first ranks may get one row more.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.reducescatter([1.0, 2.0]).shape[0]
    2
    """
    return grouped_reducescatter(
        [value], name, op, compression, process_set, prescale_factor, postscale_factor
    )[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int | None = None,
    compression: type[Compressor] = Compression.none,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """`reducescatter` of several values at once.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> len(hvd.grouped_reducescatter([[1.0], [2.0]]))
    2
    """
    reduction = resolve(op)
    if reduction not in (Average, Sum):
        raise ValueError(f"Received op=hvd.{reduction.name}. Give hvd.Average or hvd.Sum.")
    scales = (prescale_factor, postscale_factor)
    collective = Collective("reducescatter", process_set, name or "", (), reduction, None, scales)

    def backward(upstream: list[Any]) -> list[Any]:
        count = len(process_set.ranks) if reduction is Sum else 1
        factor = prescale_factor * postscale_factor * count
        gather = Collective("allgather", process_set, name or "")
        return run_all(gather, [scale(each, factor) for each in upstream], None, has_rows=True)

    packed = [compression.compress(as_tensor(value)) for value in tensors]
    results = run_all(collective, [tensor for tensor, _ in packed], backward, has_rows=True)
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, packed, strict=True)
    ]


def alltoall(
    value: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[i]` rows of a value to the i-th process, or equal numbers of rows.

    Returns the received rows in the order of the ranks; with `splits`, also how many came from
    each process.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> rows, received = hvd.alltoall([1.0, 2.0], splits=[2])
    >>> [int(number) for number in received]
    [2]
    """
    collective = Collective("alltoall", process_set, name or "")
    given = as_tensor(value)
    count = len(check_member(process_set).ranks)
    received: list[Any] = []

    def forward(tensors: list[Any]) -> list[Any]:
        parts = _equal_parts(tensors[0], count) if splits is None else _numbers(tensors[1])
        return run(collective, tensors[:1], splits=parts)[0]

    def backward(upstream: list[Any]) -> list[Any]:
        returned = alltoall(upstream[0], received[0], name, process_set)[0]
        return [returned, None][: len(inputs)]

    def shapes() -> list[Any]:
        rows = None if not given.shape.rank else (None, *given.shape[1:])
        return [(keras.backend.standardize_dtype(given.dtype), rows), ("int32", (count,))]

    inputs = [given] if splits is None else [given, as_tensor(splits)]
    results = framework().run(collective.title, inputs, forward, backward, shapes)
    received.append(results[1])
    return results[0] if splits is None else (results[0], results[1])


def join(device: int = -1) -> int:
    """This process has no more data: contribute zeros to the others' `allreduce` until all joined.

    Returns the rank that joined last. `device` is accepted and ignored.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.join()
    0
    """
    process_set = check_member(global_process_set)
    while True:
        agreement = negotiate(CollectiveRequest(JOIN), process_set)
        if agreement.last_to_join is not None:
            return agreement.last_to_join
        execute_with_zeros(agreement.request, process_set)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all processes have called this.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.barrier()
    """
    run(Collective("barrier", process_set), [])


def _allreduce_rows(
    value: Any,
    name: str | None,
    op: ReduceOp,
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> Any:
    """All-reduce IndexedSlices: gather the rows of all processes."""
    if op not in (Average, Sum):
        raise NotImplementedError(f"hvd.{op.name} is not possible with IndexedSlices.")
    if scales != (1.0, 1.0):
        raise NotImplementedError(_SCALED)
    collective = Collective("allgather", process_set, name or "")
    values, indices = run_all(collective, [value.values, value.indices], None, has_rows=True)
    if op is Average:
        values = values / len(check_member(process_set).ranks)
    return framework().with_rows(value, values, indices)


def _equal_parts(tensor: Any, count: int) -> list[int]:
    rows = tensor.shape[0] if len(tensor.shape) else 0
    return [rows // count] * count if rows % count == 0 else [rows]


def _numbers(splits: Any) -> list[int]:
    return [int(number) for number in keras.ops.convert_to_numpy(splits).reshape(-1)]


def reduce_all(
    collective: Collective, values: Sequence[Any], compression: type[Compressor] = Compression.none
) -> list[Any]:
    """Reduce several values in one collective."""
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
    """Gather several values in one collective."""
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
    """Broadcast several values in one collective."""
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
    """A collective with one result per tensor; `has_rows`: the number of rows may change."""
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

    return framework().run(
        collective.title,
        tensors,
        lambda given: run(collective, given)[0],
        backward,
        shapes,
    )


def _average_of(collective: Collective) -> Collective:
    return Collective("allreduce", collective.process_set, collective.name, (), Average)


def _own_rows(total: Any, own: Any, collective: Collective) -> Any:
    """The rows of a gathered tensor that came from this process."""
    members = collective.process_set
    num_rows = keras.ops.shape(own)[0]
    (counts,) = gather_all(Collective("allgather", members), [keras.ops.reshape(num_rows, (1,))])
    before = keras.ops.sum(counts[: members.rank()])
    return total[before : before + num_rows]
