"""Layers for images on XLA's CPU kernels, by the ways that are fast there.

A convolution of single pixels is a matrix product: as a convolution, the gradient of its kernel
takes XLA three times as long. The gradient of max pooling is to XLA a search in every window, which
takes five times as long as the same by comparisons of shifted images.
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

_MOST_PLACES = 16
"""In a window whose places are compared one by one; beyond that the search is not slower."""

_Pair = tuple[int, int]


def use_kernels(model: keras.Model, *, num_replicas: int) -> None:
    """Have layers compute in these ways; what they give is the same to rounding.

    One replica has all cores: with them a product is not faster, and takes more memory.
    """
    for layer in model._flatten_layers():
        if _is_convolution(layer) and num_replicas > 1:
            bind(layer, "convolution_op", _convolution_op(layer))
        elif _is_max_pooling(layer):
            bind(layer, "call", _pooling_call(layer))


def leave_kernels(model: keras.Model) -> None:
    """Give layers back to plain Keras."""
    for layer in model._flatten_layers():
        if _is_convolution(layer):
            unbind(layer, "convolution_op")
        elif _is_max_pooling(layer):
            unbind(layer, "call")


def _is_convolution(layer: Any) -> bool:
    own = getattr(type(layer), "convolution_op", None)
    return own is layers.Conv2D.convolution_op and layer.rank == 2


def _is_max_pooling(layer: Any) -> bool:
    is_plain = isinstance(layer, layers.MaxPooling2D)
    return is_plain and type(layer).call is layers.MaxPooling2D.call


def _are_images(layer: Any, inputs: Any) -> bool:
    is_array = isinstance(inputs, jax.Array) and inputs.ndim == 4 and inputs.size > 0
    # Of shorter numbers a product may add up in fewer digits than a convolution.
    is_exact = is_array and inputs.dtype in (numpy.float32, numpy.float64)
    return is_exact and layer.data_format == "channels_last"


def _convolution_op(layer: Any) -> Callable[[Any, Any], Any]:
    def convolve(inputs: Any, kernel: Any) -> Any:
        pixels = keras.ops.convert_to_tensor(kernel)
        if not (_are_images(layer, inputs) and _is_of_pixels(inputs, pixels)):
            return original(layer, "convolution_op")(inputs, kernel)
        rows, columns = layer.strides
        seen = inputs[:, ::rows, ::columns]
        return lax.dot_general(seen, pixels[0, 0], (((3,), (0,)), ((), ())))

    return convolve


def _is_of_pixels(inputs: Any, kernel: Any) -> bool:
    is_dense = kernel.shape[:3] == (1, 1, inputs.shape[3])
    return bool(is_dense and kernel.dtype == inputs.dtype)


def _pooling_call(layer: Any) -> Callable[[Any], Any]:
    def call(inputs: Any) -> Any:
        places = math.prod(layer.pool_size)
        if not (_are_images(layer, inputs) and places <= _MOST_PLACES):
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
    return functools.reduce(numpy.maximum, _places(x, size, strides, shape))


@_max_pool.defjvp
def _max_pool_change(
    size: _Pair, strides: _Pair, shape: _Pair, values: tuple[Any], changes: tuple[Any]
) -> tuple[Any, Any]:
    """The change of a maximum is that of the first place that has it, as XLA's search finds."""
    (x,), (of_x,) = values, changes
    outputs = _max_pool(x, size, strides, shape)
    is_found = numpy.zeros(outputs.shape, bool)
    change = numpy.zeros_like(outputs)
    places = zip(_places(x, size, strides, shape), _places(of_x, size, strides, shape), strict=True)
    for place, of_place in places:
        is_here = (place == outputs) & ~is_found
        is_found |= is_here
        change += numpy.where(is_here, of_place, 0)
    return outputs, change


def _places(x: Any, size: _Pair, strides: _Pair, shape: _Pair) -> list[Any]:
    """What each place of the windows sees: the images, shifted and thinned out."""
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
