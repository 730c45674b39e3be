"""A faster computation of max pooling on XLA's CPU backend; see unisono.devices.cpu_layers.

XLA computes the gradient of max pooling by a search in every window, which takes five times as
long as comparing shifted images.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import keras
from jax import lax, numpy
from keras import layers

from unisono.hooks import bind, original, unbind
from unisono.keras_internals import layers_of

_MAX_WINDOW = 16
"""Pixels of a window that are compared one by one; beyond that the search is not slower."""

_Pair = tuple[int, int]


def replace_layers(model: keras.Model, names: frozenset[str]) -> None:
    """Replace these computations in a model; results are the same up to rounding.

    Args:
        model: The model, whose nested models are searched as well.
        names: Some of `JaxFramework.cpu_layers`.
    """
    for layer in layers_of(model) if "max_pool" in names else ():
        if _is_max_pooling(layer):
            bind(layer, "call", _pooling_call(layer))


def restore_layers(model: keras.Model) -> None:
    """Restore Keras' own computations."""
    for layer in layers_of(model):
        if _is_max_pooling(layer):
            unbind(layer, "call")


def _is_max_pooling(layer: Any) -> bool:
    is_plain = isinstance(layer, layers.MaxPooling2D)
    return is_plain and type(layer).call is layers.MaxPooling2D.call


def _are_images(layer: Any, inputs: Any) -> bool:
    is_array = isinstance(inputs, jax.Array) and inputs.ndim == 4 and inputs.size > 0
    is_float = is_array and inputs.dtype in (numpy.float32, numpy.float64)
    return is_float and layer.data_format == "channels_last"


def _pooling_call(layer: Any) -> Callable[[Any], Any]:
    def call(inputs: Any) -> Any:
        if not (_are_images(layer, inputs) and math.prod(layer.pool_size) <= _MAX_WINDOW):
            return original(layer, "call")(inputs)
        size, strides = tuple(layer.pool_size), tuple(layer.strides)
        padding = lax.padtype_to_pads(inputs.shape[1:3], size, strides, layer.padding.upper())
        (top, bottom), (left, right) = padding
        rows = (inputs.shape[1] + top + bottom - size[0]) // strides[0] + 1
        columns = (inputs.shape[2] + left + right - size[1]) // strides[1] + 1
        if rows < 1 or columns < 1:
            return original(layer, "call")(inputs)
        lowest = numpy.array(-numpy.inf, inputs.dtype)
        no = (0, 0, 0)
        padded = lax.pad(inputs, lowest, (no, (top, bottom, 0), (left, right, 0), no))
        return _max_pool(padded, size, strides, (rows, columns))

    return call


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _max_pool(x: Any, size: _Pair, strides: _Pair, shape: _Pair) -> Any:
    return functools.reduce(numpy.maximum, _shifted(x, size, strides, shape))


@_max_pool.defjvp
def _max_pool_jvp(
    size: _Pair, strides: _Pair, shape: _Pair, primals: tuple[Any], tangents: tuple[Any]
) -> tuple[Any, Any]:
    """The tangent of a maximum is that of the first pixel that has it, as in XLA's search."""
    (x,), (tangent_x,) = primals, tangents
    outputs = _max_pool(x, size, strides, shape)
    is_found = numpy.zeros(outputs.shape, bool)
    tangent = numpy.zeros_like(outputs)
    pixels, tangents_of = (_shifted(value, size, strides, shape) for value in (x, tangent_x))
    for pixel, of_pixel in zip(pixels, tangents_of, strict=True):
        is_here = (pixel == outputs) & ~is_found
        is_found |= is_here
        tangent += numpy.where(is_here, of_pixel, 0)
    return outputs, tangent


def _shifted(x: Any, size: _Pair, strides: _Pair, shape: _Pair) -> list[Any]:
    """For each pixel of a window, the images shifted by it and strided."""
    count, channels = x.shape[0], x.shape[3]
    last_row, last_column = ((n - 1) * by + 1 for n, by in zip(shape, strides, strict=True))
    return [
        lax.slice(
            x,
            (0, row, column, 0),
            (count, row + last_row, column + last_column, channels),
            (1, *strides, 1),
        )
        for row, column in itertools.product(range(size[0]), range(size[1]))
    ]
