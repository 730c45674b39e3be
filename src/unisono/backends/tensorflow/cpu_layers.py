"""Layers for images on TensorFlow's CPU kernels, by the ways that are fast there.

A convolution of single pixels is a matrix product, whose gradients take less time as such. And a
bias that is added as a tensor gets its gradient from a plain sum: TensorFlow joins that of a
`bias_add` with the gradient of the kernel, and the two then take up to twice as long as apart.
Batch norm: see tensorflow_batch_norm.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from unisono.backends.tensorflow.cpu_batch_norm import can_normalize, normalize
from unisono.hooks import bind, original, unbind


def use_kernels(
    model: keras.Model,
    current: Callable[[], Any],
    *,
    sync_batch_norm: bool = True,
    is_alone: bool = False,
) -> None:
    """Have layers compute in these ways while a replica's step runs; `is_alone`: at any time."""

    def may_use() -> bool:
        return is_alone or current() is not None

    mapped = _mapped_layers(model)
    for layer in model._flatten_layers():
        if _is_convolution(layer):
            bind(layer, "call", _call(layer, may_use))
        elif _is_batch_norm(layer) and id(layer) not in mapped:
            bind(layer, "call", _norm_call(layer, current, may_use, is_global=sync_batch_norm))


def leave_kernels(model: keras.Model) -> None:
    """Give layers back to plain Keras."""
    for layer in model._flatten_layers():
        if _is_convolution(layer) or _is_batch_norm(layer):
            unbind(layer, "call")


def _is_convolution(layer: Any) -> bool:
    if type(layer).call is not layers.Conv2D.call:  # Which convolutions of other ranks share.
        return False
    return type(layer).convolution_op is layers.Conv2D.convolution_op and layer.rank == 2


def _is_batch_norm(layer: Any) -> bool:
    plain = layers.BatchNormalization
    is_plain = type(layer).call is plain.call
    return is_plain and type(layer)._moments is plain._moments


def _mapped_layers(model: keras.Model) -> set[int]:
    """Layers that may run in a `tf.vectorized_map`, which drops gradients of one's own."""
    wrappers = [one for one in model._flatten_layers() if isinstance(one, layers.TimeDistributed)]
    return {id(layer) for wrapper in wrappers for layer in wrapper._flatten_layers()}


def _norm_call(
    layer: Any,
    current: Callable[[], Any],
    may_use: Callable[[], bool],
    *,
    is_global: bool,
) -> Callable[..., Any]:
    def call(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        replica = current()
        is_meant = training and layer.trainable and may_use()
        if not (is_meant and can_normalize(layer, inputs, mask, replica)):
            return original(layer, "call")(inputs, training=training, mask=mask)
        return normalize(layer, inputs, replica if is_global else None, formula)

    def formula(x: Any, gamma: Any, beta: Any) -> Any:
        mean, variance = layer._moments(x, None)
        return tf.nn.batch_normalization(x, mean, variance, beta, gamma, layer.epsilon)

    return call


def _call(layer: Any, may_use: Callable[[], bool]) -> Callable[[Any], Any]:
    def call(inputs: Any) -> Any:
        if not (may_use() and _are_images(layer, inputs)):
            return original(layer, "call")(inputs)
        kernel = ops.convert_to_tensor(layer.kernel)
        bias = ops.convert_to_tensor(layer.bias) if layer.use_bias else None
        if _is_of_pixels(layer, inputs, kernel):
            outputs = _product(inputs, kernel, bias)
        else:
            outputs = layer.convolution_op(inputs, kernel)
            outputs = outputs if bias is None else outputs + bias
        return outputs if layer.activation is None else layer.activation(outputs)

    return call


def _are_images(layer: Any, inputs: Any) -> bool:
    is_exact = isinstance(inputs, tf.Tensor) and inputs.dtype in (tf.float32, tf.float64)
    return is_exact and inputs.shape.rank == 4 and layer.data_format == "channels_last"


def _is_of_pixels(layer: Any, inputs: Any, kernel: Any) -> bool:
    is_dense = tuple(kernel.shape[:3]) == (1, 1, inputs.shape[3])
    return is_dense and kernel.dtype == inputs.dtype and tuple(layer.strides) == (1, 1)


def _product(inputs: Any, kernel: Any, bias: Any) -> Any:
    pixels = tf.matmul(tf.reshape(inputs, [-1, inputs.shape[3]]), kernel[0, 0])
    pixels = pixels if bias is None else pixels + bias
    shape = tf.concat([tf.shape(inputs)[:3], tf.shape(kernel)[3:]], 0)
    return tf.ensure_shape(tf.reshape(pixels, shape), [*inputs.shape[:3], kernel.shape[3]])
