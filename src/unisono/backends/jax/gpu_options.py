"""Options of XLA for steps on GPUs, passed with the step: XLA_FLAGS is read when devices start.

By default XLA runs every all-reduce where its result is needed and computes nothing meanwhile. Its
latency-hiding scheduler starts the reduction of a layer's gradients while those of the layers
before it are computed. For that there must be several: XLA combines up to 30 MiB of gradients,
which is all of a small net, and all of them are known only after the backward pass.
"""

import functools
import logging
import os
from typing import Any

import jax

_SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
_BUCKET = "xla_gpu_all_reduce_combine_threshold_bytes"
_NUM_BUCKETS = 24
_SMALLEST_BYTES, _LARGEST_BYTES = 2**20, 25 * 2**20  # Below a MiB, starting NCCL takes the time.
_PLATFORMS = ("gpu", "cuda", "rocm")


def step_options(device: Any, gradient_bytes: int) -> dict[str, Any]:
    """Arguments of `jax.jit` for a step on devices like this one; none where it is no GPU."""
    if device.platform not in _PLATFORMS:
        return {}
    bucket = min(max(gradient_bytes // _NUM_BUCKETS, _SMALLEST_BYTES), _LARGEST_BYTES)
    flags = os.environ.get("XLA_FLAGS", "")
    options = {
        name: value
        for name, value in {_SCHEDULER: True, _BUCKET: bucket}.items()
        if name not in flags and _is_known(device, name, value)  # What the user has decided stays.
    }
    return {"compiler_options": options} if options else {}


@functools.cache
def _is_known(device: Any, name: str, value: bool | int) -> bool:
    """Whether this release of XLA has an option; it refuses to compile with an unknown one."""
    where = jax.sharding.SingleDeviceSharding(device)
    number = jax.ShapeDtypeStruct((), "float32", sharding=where)
    try:
        jax.jit(lambda x: x + 1, compiler_options={name: value}).lower(number).compile()
    except Exception as error:
        if name not in str(error):
            raise
        logging.getLogger("unisono").warning(
            "XLA does not know its option %s in JAX %s, so gradients are reduced without overlap: "
            "%s",
            name,
            jax.__version__,
            error,
        )
        return False
    return True
