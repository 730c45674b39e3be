"""Mean and variance of the global batch, by one collective in each direction and few kernels.

The formula is that of Keras' torch backend, the mean of squares minus the square of the mean: its
sums over the replicas are all that there is to exchange. CPUs and GPUs take the same path, so that
what is tested on the former holds for the latter.
"""

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from unisono.backends.torch.replica import TorchReplica


def global_moments(
    x: torch.Tensor, axes: list[int], replica: "TorchReplica"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of the inputs of all replicas, with one entry per channel."""
    mean, variance = _Moments.apply(x, axes, replica)
    return mean, variance


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, axes: list[int], replica: "TorchReplica"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = math.prod(x.shape[axis] for axis in axes)
        (num_channels,) = (n for axis, n in enumerate(x.shape) if axis not in axes)
        # The count is a number of a kernel launch, and the sums are written where they are needed.
        sums = x.new_full((1 + 2 * num_channels,), float(count))
        _, of_x, of_squares = sums.split([1, num_channels, num_channels])
        torch.sum(x, axes, out=of_x)
        torch.sum(torch.square(x), axes, out=of_squares)
        total = replica.group.all_reduce_flat(sums)
        mean, mean_of_squares = (total[1:] / total[:1]).split(num_channels)
        variance = torch.addcmul(mean_of_squares, mean, mean, value=-1.0)
        ctx.save_for_backward(x, mean, total[:1])
        ctx.axes, ctx.replica = axes, replica
        return mean, variance

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, mean, count = ctx.saved_tensors
        replica, axes = ctx.replica, ctx.axes
        if torch.is_grad_enabled():  # For gradients of gradients.
            moments = _by_formula(x, axes, replica)
            (gradient,) = torch.autograd.grad(moments, [x], upstream, create_graph=True)
            return gradient, None, None
        weight = 1.0 if replica.state.is_weighted else replica.share
        own = torch.cat(upstream)
        total = replica.group.all_reduce_flat(own if weight == 1.0 else own * weight)
        # Of a sum over rows: every row counts by its part in the mean.
        total = total.div_(count if weight == 1.0 else count * weight)
        of_mean, of_variance = total.split(len(mean))
        shape = [1 if axis in axes else n for axis, n in enumerate(x.shape)]
        distances = x - mean.view(shape)
        gradient = torch.addcmul(of_mean.view(shape), distances, of_variance.view(shape), value=2.0)
        return gradient, None, None


def _by_formula(
    x: torch.Tensor, axes: list[int], replica: "TorchReplica"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in operations that can be differentiated twice."""
    count = float(math.prod(x.shape[axis] for axis in axes))
    means = torch.stack([x.mean(axes), torch.square(x).mean(axes)])
    every = replica.stack(torch.cat([torch.full_like(means[:1], count), means]))
    mean, mean_of_squares = (every[:, :1] * every[:, 1:]).sum(0) / every[:, :1].sum(0)
    return mean, mean_of_squares - torch.square(mean)
