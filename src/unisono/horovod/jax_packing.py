"""Many small arrays of JAX as few large ones, so that they travel in few collectives.

torch and TensorFlow pack tensors in their engines; on JAX packing is quick only if it is compiled.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

Spec = tuple[tuple[tuple[int, ...], str], ...]


def pack(arrays: Sequence[Any]) -> list[Any]:
    """One vector for each type, in the order in which types appear."""
    packed: list[Any] = _pack(list(arrays))
    return packed


def unpack(vectors: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """What `pack` made of arrays, in their shapes again."""
    spec = tuple((tuple(array.shape), str(array.dtype)) for array in arrays)
    unpacked: list[Any] = _unpack(list(vectors), spec)
    return unpacked


@jax.jit
def _pack(arrays: list[Any]) -> list[Any]:
    dtypes = dict.fromkeys(array.dtype for array in arrays)
    return [
        jnp.concatenate([array.ravel() for array in arrays if array.dtype == dtype])
        for dtype in dtypes
    ]


@functools.partial(jax.jit, static_argnums=1)
def _unpack(vectors: list[Any], spec: Spec) -> list[Any]:
    places = {dtype: number for number, dtype in enumerate(dict.fromkeys(d for _, d in spec))}
    taken = [0] * len(vectors)
    results = []
    for shape, dtype in spec:
        place = places[dtype]
        size = functools.reduce(lambda a, b: a * b, shape, 1)
        results.append(vectors[place][taken[place] : taken[place] + size].reshape(shape))
        taken[place] += size
    return results
