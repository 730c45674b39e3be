"""Collectives with gradients on torch."""

from collections.abc import Sequence
from typing import Any

import torch

from unisono.horovod.frameworks import HorovodFramework, RunTensors, Shapes


class _Torch(HorovodFramework):
    def run(
        self,
        what: str,
        tensors: Sequence[Any],
        forward: RunTensors,
        backward: RunTensors | None,
        shapes: Shapes,
    ) -> list[Any]:
        needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if backward is None or not needs_gradient:
            with torch.no_grad():
                return forward(list(tensors))

        run_forward, run_backward = forward, backward

        class Recorded(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *given: Any) -> Any:
                return tuple(run_forward(list(given)))

            @staticmethod
            def backward(ctx: Any, *upstream: Any) -> Any:
                return tuple(run_backward(list(upstream)))

        return list(Recorded.apply(*tensors))

    def is_cuda_built(self) -> bool:
        return torch.version.cuda is not None

    def is_rocm_built(self) -> bool:
        return torch.version.hip is not None

    def nccl_version(self) -> int:
        if not self.is_cuda_built() or not torch.distributed.is_nccl_available():
            return 0
        major, minor, patch = torch.cuda.nccl.version()
        return int(major * 10000 + minor * 100 + patch)


FRAMEWORK = _Torch()
