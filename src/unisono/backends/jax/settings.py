"""A policy on JAX: the variables that its devices read when they start."""

import os
from typing import Any

from unisono.devices import Grant, Policy, has_cuda_started

_SHARE = "XLA_CLIENT_MEM_FRACTION"
_OLD_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_AT_START = "XLA_PYTHON_CLIENT_PREALLOCATE"
# The size of the CPU client's thread pools. XLA_FLAGS has no flag for it that still works.
_THREADS = "PJRT_NPROC"
_ALL = 0.95  # Some of a GPU's memory is the driver's own.


class JaxSettings:
    """JAX reads everything from the environment, and when its devices start, not on import."""

    framework = "JAX"
    module = "jax"
    first_use = "building a model, making an array, jax.devices()"

    def why_too_late(self, jax: Any, policy: Policy) -> str | None:
        if has_started():
            return "JAX has started its devices"
        if policy.gpus is not None and has_cuda_started():
            return "CUDA has started in this process"
        return None

    def set_variables(self, grant: Grant) -> None:
        if grant.cpu_threads is not None:
            os.environ[_THREADS] = str(grant.cpu_threads)
        if grant.is_growing is not None:
            os.environ[_AT_START] = "false" if grant.is_growing else "true"
        share = _ALL if grant.is_growing is False else grant.limit_share
        if share is not None:
            os.environ.pop(_OLD_SHARE, None)  # JAX refuses to see both.
            os.environ[_SHARE] = f"{share:.6f}"
        if grant.limit_share is not None:
            os.environ[_AT_START] = "false"

    def apply(self, jax: Any, grant: Grant) -> None:
        """The variables are all that it takes."""


def has_started() -> bool:
    """Whether JAX has started its devices; it has to be imported."""
    # There is no public question for this; jax.config.update only answers by raising.
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())
