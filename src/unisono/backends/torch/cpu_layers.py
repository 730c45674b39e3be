"""Layers of images that compute the same in a cheaper way on CPUs: all that torch replaces.

Keras copies images with channels last to channels first for torch's functions, and the outputs of a
convolution back; torch computes in either layout, so a view is enough. Batch norm takes torch's own
kernels, where Keras' formula takes a pass over memory per operation. Only processes that
`unisono run` starts on CPUs use these: see devices.cpu_layers.
"""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import torch
from keras import layers, ops

from unisono.backends.torch.framework import TorchFramework
from unisono.backends.torch.replica import TorchReplica
from unisono.devices import Placement
from unisono.devices.cpu_layers import chosen_cpu_layers
from unisono.hooks import bind, original, unbind
from unisono.keras_internals import layers_of

# Statistics are taken over pieces of a batch: the kernels sum up one value after the other, which
# over many rows would cost digits.
_PIECE_ROWS = 2048


def chosen_layers(placement: Placement) -> "CpuLayers | None":
    """The replacements that this process uses, if any."""
    names = chosen_cpu_layers(placement, TorchFramework.cpu_layers)
    return CpuLayers(names) if names else None


class CpuLayers:
    """Some of the replacements, by name; see replication.Kernels."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def use_kernels(
        self,
        model: keras.Model,
        current: Callable[[], TorchReplica | None],
        *,
        sync_batch_norm: bool,
    ) -> None:
        for layer in layers_of(model):
            name = _replacement_of(layer)
            if name not in self._names:
                continue
            if name == "batch_norm":
                bind(layer, "call", _norm_call(layer, current if sync_batch_norm else _alone))
            else:
                bind(layer, "call", _image_call(layer, _convolve if name == "conv" else _pool))

    def leave_kernels(self, model: keras.Model) -> None:
        for layer in layers_of(model):
            if _replacement_of(layer) in self._names:
                unbind(layer, "call")


def _replacement_of(layer: Any) -> str | None:
    """The name of what replaces a layer's `call`, if that is the one that Keras wrote."""
    call = type(layer).call
    if call is layers.BatchNormalization.call:
        return "batch_norm"
    if call is layers.MaxPooling2D.call:  # Of the base class, so of average pooling as well.
        return "pool"
    own = getattr(type(layer), "convolution_op", None)
    is_plain = call is layers.Conv2D.call and own is layers.Conv2D.convolution_op
    return "conv" if is_plain else None


def _alone() -> None:
    return None


def _are_images(inputs: Any) -> bool:
    return (
        isinstance(inputs, torch.Tensor)
        and inputs.ndim == 4
        and inputs.device.type == "cpu"
        and inputs.is_floating_point()
    )


# -- convolution and pooling ----------------------------------------------------------------------


def _image_call(layer: Any, compute: Callable[[Any, torch.Tensor], Any]) -> Callable[[Any], Any]:
    def call(inputs: Any) -> Any:
        if layer.data_format == "channels_last" and _are_images(inputs):
            return compute(layer, inputs)
        return original(layer, "call")(inputs)

    return call


def _convolve(layer: Any, inputs: torch.Tensor) -> Any:
    outputs = ops.conv(
        inputs.permute(0, 3, 1, 2),
        layer.kernel,
        strides=list(layer.strides),
        padding=layer.padding,
        dilation_rate=layer.dilation_rate,
        data_format="channels_first",
    ).permute(0, 2, 3, 1)
    if layer.use_bias:
        outputs = outputs.add_(ops.convert_to_tensor(layer.bias))  # Nobody else has seen them.
    return outputs if layer.activation is None else layer.activation(outputs)


def _pool(layer: Any, inputs: torch.Tensor) -> Any:
    pool = ops.max_pool if layer.pool_mode == "max" else ops.average_pool
    return pool(
        inputs.permute(0, 3, 1, 2),
        pool_size=layer.pool_size,
        strides=layer.strides,
        padding=layer.padding,
        data_format="channels_first",
    ).permute(0, 2, 3, 1)


# -- batch norm -----------------------------------------------------------------------------------


def _norm_call(layer: Any, current: Callable[[], TorchReplica | None]) -> Callable[..., Any]:
    """`current()`: the replica whose peers' statistics count as well; None for these rows alone."""

    def call(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        is_plain = _are_images(inputs) and inputs.numel() > 0 and mask is None and not layer.renorm
        if not (training and layer.trainable and is_plain):
            return original(layer, "call")(inputs, training=training, mask=mask)
        dtype = torch.float32  # As in Keras, whatever the type of the inputs.
        gamma = layer.gamma.value.to(dtype) if layer.scale else None
        beta = layer.beta.value.to(dtype) if layer.center else None
        x = inputs.to(dtype).movedim(layer.axis, 1)
        y, mean, variance = _BatchNorm.apply(x, gamma, beta, layer.epsilon, current())
        with torch.no_grad():
            for moving, new in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
                old = moving.value.to(dtype)
                moving.assign(old * layer.momentum + new * (1.0 - layer.momentum))
        return ops.cast(y.movedim(1, layer.axis), layer.compute_dtype)

    return call


class _BatchNorm(torch.autograd.Function):
    """x of shape (rows, channels, height, width); also its mean and variance."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gamma: torch.Tensor | None,
        beta: torch.Tensor | None,
        epsilon: float,
        replica: TorchReplica | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count, mean, variance = _merged(torch.stack([_statistics(part) for part in _pieces(x)]))
        if replica is not None:
            own = torch.stack([count, mean, variance])
            count, mean, variance = _merged(torch.stack(replica.group.all_gather(own)))
        ctx.save_for_backward(x, gamma, beta, mean, variance, count)
        ctx.epsilon, ctx.replica = epsilon, replica
        ctx.mark_non_differentiable(mean, variance)
        return _normalized(x, mean, variance, gamma, beta, epsilon), mean, variance

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[Any, ...]:
        x, gamma, beta, mean, variance, count = ctx.saved_tensors
        epsilon, replica, above = ctx.epsilon, ctx.replica, upstream[0]
        if torch.is_grad_enabled():  # For gradients of gradients.
            needed = [t for t in (x, gamma, beta) if t is not None and t.requires_grad]
            y = _by_formula(x, gamma, beta, epsilon, replica)
            found = iter(torch.autograd.grad(y, needed, above, create_graph=True))
            parts = [
                next(found) if t is not None and t.requires_grad else None for t in (x, gamma, beta)
            ]
            return (*parts, None, None)
        if x.is_contiguous(memory_format=torch.channels_last):
            above = above.contiguous(memory_format=torch.channels_last)
        pairs = zip(_pieces(x), _pieces(above), strict=True)
        sums = torch.stack([_gradient_sums(*pair, mean, variance, epsilon) for pair in pairs]).sum(
            0
        )
        of_gamma, of_beta = sums
        gradient = None
        if ctx.needs_input_grad[0]:
            if replica is not None:
                weight = 1.0 if replica.state.is_weighted else replica.share
                (total,) = replica.group.all_reduce([sums * weight])
                sums = total / weight
            scale = (variance + epsilon).rsqrt() * (1.0 if gamma is None else gamma)
            by_x, by_one = -scale * sums / count
            gradient = _normalized(x, mean, variance, by_x, by_one, epsilon)
            gradient.addcmul_(above, scale[:, None, None])
        of_gamma, of_beta = None if gamma is None else of_gamma, None if beta is None else of_beta
        return gradient, of_gamma, of_beta, None, None


def _pieces(x: torch.Tensor) -> Iterator[torch.Tensor]:
    return iter(x.split(max(1, _PIECE_ROWS // (x.shape[2] * x.shape[3]))))


def _statistics(x: torch.Tensor) -> torch.Tensor:
    """Count, mean and variance, each with one entry per channel."""
    mean, variance = torch.ops.aten.batch_norm_update_stats(x, None, None, 0.0)
    return torch.stack([torch.full_like(mean, x.numel() // x.shape[1]), mean, variance])


def _merged(parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count, mean and variance of everything, from those of parts along the first axis."""
    counts, means, variances = parts[:, 0], parts[:, 1], parts[:, 2]
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total
    variance = (counts * (variances + torch.square(means - mean))).sum(0) / total
    return total, mean, variance


def _normalized(
    x: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    return torch.native_batch_norm(x, gamma, beta, mean, variance, False, 0.0, epsilon)[0]


def _gradient_sums(
    x: torch.Tensor,
    above: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    epsilon: float,
) -> torch.Tensor:
    """The gradients of gamma and beta."""
    wanted = [False, True, True]
    _, of_gamma, of_beta = torch.ops.aten.native_batch_norm_backward(
        above, x, torch.ones_like(mean), mean, variance, None, None, False, epsilon, wanted
    )
    return torch.stack([of_gamma, of_beta])


def _by_formula(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    epsilon: float,
    replica: TorchReplica | None,
) -> torch.Tensor:
    """The same in operations that can be differentiated twice."""
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    if replica is not None:
        count = torch.full_like(mean, x.numel() // x.shape[1])
        _, mean, variance = _merged(replica.stack(torch.stack([count, mean, variance])))
    scale = (variance + epsilon).rsqrt() * (1.0 if gamma is None else gamma)
    y = (x - mean[:, None, None]) * scale[:, None, None]
    return y if beta is None else y + beta[:, None, None]
