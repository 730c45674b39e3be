"""How values of several processes become one: Horovod's reduction operations."""

import enum
import warnings


class ReduceOp(enum.IntEnum):
    """The operations, with the numbers that Horovod gives them."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product


def resolve(op: int | None, average: bool | None = None) -> ReduceOp:
    """The operation that `op`, or its forerunner `average`, asks for."""
    if op is not None and average is not None:
        raise ValueError("Received both op= and average=. Give op alone; it replaces average.")
    if average is not None:
        warnings.warn(
            "average= is deprecated; write op=hvd.Average or op=hvd.Sum.",
            DeprecationWarning,
            stacklevel=3,
        )
        return Average if average else Sum
    if op is None:
        return Average
    found = ReduceOp(op)
    if found is Adasum:
        raise NotImplementedError(
            "op=hvd.Adasum is not implemented. Use hvd.Average (the default) or hvd.Sum."
        )
    return found
