"""Warn where the driver has GPUs and the backend sees none: training would use one CPU, silently.

Most often the framework was installed without its GPU build (`pip install jax`).
"""

import warnings

from unisono.backends.base import Build, Framework
from unisono.devices import Placement, list_devices, num_listed_gpus
from unisono.topology import topology

_has_warned = False


def warn_of_missing_gpus(placement: Placement, framework: Framework) -> None:
    """Warn, once in a process, that a placement on CPUs leaves the driver's GPUs idle."""
    global _has_warned
    if placement.kind != "cpu" or placement.is_simulated or _has_warned:
        return
    if not topology().is_chief or framework.is_kept_from_gpus() or not num_listed_gpus():
        return
    _has_warned = True
    remark = explain_missing_gpus(framework, framework.build(), num_listed_gpus())
    warnings.warn(remark, stacklevel=4)


def explain_missing_gpus(framework: Framework, build: Build, num_gpus: int) -> str:
    """Why a framework sees no GPU although the driver shows some, and what to do.

    `build` is that of the framework, which is not imported here.
    """
    found = f"The driver shows {num_gpus} GPU(s) and {framework.title} {build.version} sees none"
    listing = list_devices()
    install = framework.gpu_install(listing.cuda)
    if listing.driver is None:  # Counted by another backend, as on ROCm.
        return f"{found}. Install its build for these GPUs, as its documentation describes."
    if build.is_cpu_only:
        return f"{found}: it is a CPU build. Install its GPU build: {install}"
    kind = f"CUDA {build.cuda}" if build.cuda else f"ROCm {build.rocm}"
    return (
        f"{found}, though it was built for {kind}: its GPU libraries are missing or do not fit the "
        f"driver. Install them: {install}"
    )
