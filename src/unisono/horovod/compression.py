"""What travels in a reduction: tensors as they are, or as 16-bit floats."""

from typing import Any, Protocol

import keras


class Compressor(Protocol):
    """Makes a tensor smaller for its way; programs may bring one of their own."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor to send, and what `decompress` needs to know."""

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """The tensor that arrived, as it was."""


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
