"""A policy on torch: variables for CUDA's allocator, a share of each GPU, a number of threads."""

import contextlib
import os
import sys
from typing import Any

from unisono.devices import Grant, Policy, has_cuda_started

_ALLOCATOR = "PYTORCH_ALLOC_CONF"
_OLD_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
_EXPANDABLE = "expandable_segments:True"


class TorchSettings:
    """torch starts CUDA late and lets threads be set at any time, but its workers start early."""

    framework = "torch"
    module = "torch"
    first_use = "`import keras`, which asks CUDA for its GPUs, or `unisono.parallel`"

    def why_too_late(self, torch: Any, policy: Policy) -> str | None:
        team = sys.modules.get("unisono.backends.torch.worker_pool")
        if team is not None and team.has_started():
            return "unisono has started torch's worker processes"
        if policy.gpus is not None and has_cuda_started():
            return "CUDA has started in this process"
        if policy.memory is not None and torch.cuda.is_initialized():
            return "torch has started its GPUs"
        return None

    def set_variables(self, grant: Grant) -> None:
        if not grant.is_growing:
            return
        name = _OLD_ALLOCATOR if _OLD_ALLOCATOR in os.environ else _ALLOCATOR
        own = [part for part in os.environ.get(name, "").split(",") if part]
        if not any(part.startswith("expandable_segments") for part in own):
            os.environ[name] = ",".join([*own, _EXPANDABLE])

    def apply(self, torch: Any, grant: Grant) -> None:
        if grant.cpu_threads is not None:
            torch.set_num_threads(grant.cpu_threads)
            # Fixed by the first work of that kind; nothing in Keras does any.
            with contextlib.suppress(RuntimeError):
                torch.set_num_interop_threads(grant.cpu_threads)
        if grant.limit_bytes is not None:
            # Setting it starts CUDA, which is for the program to do.
            torch.cuda._lazy_call(lambda: _limit_memory(torch, grant))


def _limit_memory(torch: Any, grant: Grant) -> None:
    assert grant.limit_bytes is not None
    for i in range(torch.cuda.device_count()):
        total = torch.cuda.get_device_properties(i).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, grant.limit_bytes / total), i)
