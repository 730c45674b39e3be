"""Layers for images on torch's CPU kernels, by the ways that are fast there.

Keras brings images with channels last to torch's functions by a copy to channels first, and for a
convolution by another one back. torch computes in either layout, so a view of them will do. Batch
norm: see torch_batch_norm.
"""

from collections.abc import Callable
from typing import Any

import keras
import torch
from keras import layers, ops

from unisono.backends.torch.cpu_batch_norm import are_images, can_normalize, normalize
from unisono.backends.torch.replica import TorchReplica
from unisono.hooks import bind, original, unbind

_Call = Callable[..., Any]


def use_kernels(
    model: keras.Model,
    current: Callable[[], TorchReplica | None],
    *,
    sync_batch_norm: bool,
    is_alone: bool = False,
) -> None:
    """Have layers compute in these ways while a replica's step runs; `is_alone`: at any time."""

    def may_use() -> bool:
        return is_alone or current() is not None

    for layer in model._flatten_layers():
        if _is_as_keras_wrote(layer, layers.BatchNormalization):
            bind(layer, "call", _norm_call(layer, current, may_use, is_global=sync_batch_norm))
        elif _is_convolution(layer):
            bind(layer, "call", _image_call(layer, _convolve, may_use))
        elif _is_as_keras_wrote(layer, layers.MaxPooling2D):
            bind(layer, "call", _image_call(layer, _pool, may_use))


def leave_kernels(model: keras.Model) -> None:
    """Give layers back to plain Keras."""
    kinds = (layers.BatchNormalization, layers.Conv2D, layers.MaxPooling2D)
    for layer in model._flatten_layers():
        if any(_is_as_keras_wrote(layer, kind) for kind in kinds):
            unbind(layer, "call")


def _is_as_keras_wrote(layer: Any, kind: Any) -> bool:
    """Whether a layer's `call` is that of a class of Keras, or of the base that it shares."""
    return type(layer).call is kind.call


def _is_convolution(layer: Any) -> bool:
    own = getattr(type(layer), "convolution_op", None)
    return _is_as_keras_wrote(layer, layers.Conv2D) and own is layers.Conv2D.convolution_op


def _norm_call(
    layer: Any,
    current: Callable[[], TorchReplica | None],
    may_use: Callable[[], bool],
    *,
    is_global: bool,
) -> _Call:
    def call(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        if training and layer.trainable and may_use() and can_normalize(layer, inputs, mask):
            return normalize(layer, inputs, current() if is_global else None)
        return original(layer, "call")(inputs, training=training, mask=mask)

    return call


def _image_call(layer: Any, compute: Callable[[Any, torch.Tensor], Any], may_use: Any) -> _Call:
    def call(inputs: Any) -> Any:
        is_last = layer.data_format == "channels_last"
        if may_use() and is_last and are_images(inputs):
            return compute(layer, inputs)
        return original(layer, "call")(inputs)

    return call


def _convolve(layer: Any, inputs: torch.Tensor) -> Any:
    outputs = _channels_last(
        ops.conv(
            _channels_first(inputs),
            layer.kernel,
            strides=list(layer.strides),
            padding=layer.padding,
            dilation_rate=layer.dilation_rate,
            data_format="channels_first",
        )
    )
    if layer.use_bias:
        outputs = outputs.add_(ops.convert_to_tensor(layer.bias))  # Nobody else has seen them.
    return outputs if layer.activation is None else layer.activation(outputs)


def _pool(layer: Any, inputs: torch.Tensor) -> Any:
    pool = ops.max_pool if layer.pool_mode == "max" else ops.average_pool
    outputs = pool(
        _channels_first(inputs),
        pool_size=layer.pool_size,
        strides=layer.strides,
        padding=layer.padding,
        data_format="channels_first",
    )
    return _channels_last(outputs)


def _channels_first(x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 3, 1, 2)


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 2, 3, 1)
