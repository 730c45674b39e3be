"""Keeps freed memory in the process, where CPUs train: the system would clear it again each step.

A step takes and frees large buffers. By default the C library gives each of them back to the system
at once, which hands out cleared pages again for the next step: up to half of a step's time on JAX,
a fifth on torch. Values do not change by it; what a process has taken, it keeps.
"""

import ctypes
import os
from collections.abc import Mapping

from unisono.devices.choice import num_gpus, simulated_gpus
from unisono.errors import DeviceError

KEEP = "UNISONO_KEEP_MEMORY"
"""0: freed memory goes back to the system at once, as without unisono."""

# Numbers of mallopt's options, from malloc.h of the GNU C library.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_freed_memory(env: Mapping[str, str]) -> bool:
    """Have the C library keep freed memory from now on; whether it does.

    Not where there are GPUs, whose memory has other keepers, nor where a user has chosen how memory
    is handled.
    """
    is_chosen = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in env)
    if env.get(KEEP) == "0" or is_chosen or "malloc" in env.get("LD_PRELOAD", ""):
        return False
    if not _is_glibc() or not _is_for_cpus():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # No mapping of its own for a large buffer, and nothing given back; one heap for all threads, as
    # those of their own are too small for large buffers.
    options = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_ARENA_MAX, 1))
    return all(mallopt(number, value) for number, value in options)


def _is_glibc() -> bool:
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (AttributeError, ValueError, OSError):
        return False


def _is_for_cpus() -> bool:
    try:
        return bool(simulated_gpus()) or not num_gpus()
    except DeviceError:
        return False  # A variable that makes no sense is told to who asks for devices.
