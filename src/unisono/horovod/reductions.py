"""Horovod's reduction operations, and the compression of what is reduced."""

import enum
import warnings
from typing import Any, Protocol

import keras


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
    """The operation that `op`, or the older argument `average`, names."""
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


class Compressor(Protocol):
    """Compresses tensors for the transfer; programs may define their own."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor to send, and a context for `decompress`."""

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """The received tensor in its original data type."""


class NoneCompressor:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        return tensor


class FP16Compressor:
    """Sends floats as float16; other types as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if not keras.backend.is_float_dtype(dtype):
            return tensor, None
        return keras.ops.cast(tensor, "float16"), dtype

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        return tensor if context is None else keras.ops.cast(tensor, context)


class Compression:
    """The compressors to choose from: `Compression.none` and `Compression.fp16`."""

    none = NoneCompressor
    fp16 = FP16Compressor
