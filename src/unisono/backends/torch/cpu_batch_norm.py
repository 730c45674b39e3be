"""Batch norm of images on torch's own CPU kernels, where Keras' formula takes a pass an operation.

A fifth of the time, and on nets of many batch norms a third of a step. Sums are taken over pieces
of the batch: the kernels add up one by one, which over many rows would cost digits.
"""

from collections.abc import Iterator
from typing import Any

import keras
import torch

from unisono.backends.torch.replica import TorchReplica

_PIECE_ROWS = 2048


def are_images(inputs: Any) -> bool:
    """Whether these are batches of numbers that a CPU computes with as images."""
    return (
        isinstance(inputs, torch.Tensor)
        and inputs.ndim == 4
        and inputs.device.type == "cpu"
        and inputs.is_floating_point()
    )


def can_normalize(layer: Any, inputs: Any, mask: Any) -> bool:
    """Whether the kernels do what the layer asks for."""
    return are_images(inputs) and inputs.numel() > 0 and mask is None and not layer.renorm


def normalize(layer: Any, inputs: torch.Tensor, replica: TorchReplica | None) -> torch.Tensor:
    """A layer's outputs in training, by the statistics of all replicas, or of these rows alone."""
    dtype = torch.float32  # As Keras has it, of whatever type the inputs are.
    gamma = layer.gamma.value.to(dtype) if layer.scale else None
    beta = layer.beta.value.to(dtype) if layer.center else None
    x = inputs.to(dtype).movedim(layer.axis, 1)
    y, mean, variance = _BatchNorm.apply(x, gamma, beta, layer.epsilon, replica)
    with torch.no_grad():
        for moving, new in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
            old = moving.value.to(dtype)
            moving.assign(old * layer.momentum + new * (1.0 - layer.momentum))
    result: torch.Tensor = keras.ops.cast(y.movedim(1, layer.axis), layer.compute_dtype)
    return result


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
        statistics = torch.stack([_statistics(piece) for piece in _pieces(x)])
        count, mean, variance = _merged(statistics)
        if replica is not None:
            own = torch.stack([count, mean, variance])
            count, mean, variance = _merged(torch.stack(replica.group.all_gather(own)))
        ctx.save_for_backward(x, gamma, beta, mean, variance, count)
        ctx.epsilon, ctx.replica = epsilon, replica
        ctx.mark_non_differentiable(mean, variance)
        return _transformed(x, mean, variance, gamma, beta, epsilon), mean, variance

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
        sums = torch.stack(
            [
                _gradient_sums(*pieces, mean, variance, epsilon)
                for pieces in zip(_pieces(x), _pieces(above), strict=True)
            ]
        ).sum(0)
        of_gamma, of_beta = sums
        gradient = None
        if ctx.needs_input_grad[0]:
            if replica is not None:
                share = 1.0 if replica.state.is_weighted else replica.share
                (total,) = replica.group.add_up([sums * share])
                sums = total / share
            scale = (variance + epsilon).rsqrt() * (1.0 if gamma is None else gamma)
            by_x, by_one = -scale * sums / count
            gradient = _transformed(x, mean, variance, by_x, by_one, epsilon)
            gradient.addcmul_(above, scale[:, None, None])
        return (
            gradient,
            None if gamma is None else of_gamma,
            None if beta is None else of_beta,
            None,
            None,
        )


def _pieces(x: torch.Tensor) -> Iterator[torch.Tensor]:
    rows_each = x.shape[2] * x.shape[3]
    return iter(x.split(max(1, _PIECE_ROWS // rows_each)))


def _statistics(x: torch.Tensor) -> torch.Tensor:
    """Count, mean and variance, each with one entry a channel."""
    mean, variance = torch.ops.aten.batch_norm_update_stats(x, None, None, 0.0)
    return torch.stack([torch.full_like(mean, x.numel() // x.shape[1]), mean, variance])


def _merged(parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count, mean and variance of everything, from those of parts along the first axis."""
    counts, means, variances = parts[:, 0], parts[:, 1], parts[:, 2]
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total
    variance = (counts * (variances + torch.square(means - mean))).sum(0) / total
    return total, mean, variance


def _transformed(
    x: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    """x as units from its mean, times gamma, plus beta."""
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
