"""A device policy on torch: CUDA's allocator, a memory limit per GPU, a number of threads.

A file of its own, since it is imported before Keras has chosen a backend: it must not import torch.
"""

import contextlib
import os
import sys
from typing import Any

from unisono.devices import Grant, Policy, has_cuda_started

_ALLOCATOR = "PYTORCH_ALLOC_CONF"
_OLD_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
_EXPANDABLE = "expandable_segments:True"


class TorchSettings:
    """See backends.settings.Settings: torch starts CUDA late, but unisono starts workers early."""

    framework = "torch"
    module = "torch"
    first_use = "`import keras`, which queries CUDA for its GPUs, or `unisono.parallel`"

    def why_too_late(self, torch: Any, policy: Policy) -> str | None:
        pool = sys.modules.get("unisono.backends.torch.worker_pool")
        if pool is not None and pool.has_started():
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
            # Not now: setting it would start CUDA.
            torch.cuda._lazy_call(lambda: _limit_memory(torch, grant))


def _limit_memory(torch: Any, grant: Grant) -> None:
    assert grant.limit_bytes is not None
    for i in range(torch.cuda.device_count()):
        total = torch.cuda.get_device_properties(i).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, grant.limit_bytes / total), i)
