"""How a process that trains on CPUs gets the memory of its machine: buffers that are used again.

A step takes and frees large buffers. By default the C library gives each of them back to the system
at once, which hands out cleared pages of 4 KiB for the next step: up to half of a step's time on
JAX, a fifth on torch. A process keeps buffers of up to 32 MiB for later use instead; on JAX, whose
steps have one buffer of all that they need, those of any size once it trains. One that we start
keeps all, in large pages: only then can the C library be told so. Values never change by it.
"""

import ctypes
import os
from collections.abc import Mapping

from unisono.devices.choice import num_gpus, simulated_gpus
from unisono.errors import DeviceError

KEEP = "UNISONO_KEEP_MEMORY"
"""0: memory is handled as without unisono."""
TUNABLES = "GLIBC_TUNABLES"

_MOST_KEPT_BYTES = 32 << 20  # The largest number that the GNU C library takes.
_RISE_BYTES = 64 << 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Numbers of mallopt's options, from its malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8

_is_told = False
_has_one_heap = False


def keep_freed_memory(env: Mapping[str, str], *, in_one_heap: bool = False) -> bool:
    """Have the C library keep freed buffers from now on; whether it does.

    Not where there are GPUs, whose memory has other keepers, nor where a user has chosen how memory
    is handled. In one heap, that of the first thread, there is room for buffers of any size from
    all threads that start later.
    """
    if _is_chosen(env) or not _is_glibc() or not _is_for_cpus():
        return False
    global _is_told, _has_one_heap
    _is_told = _tell((_MMAP_THRESHOLD, _MOST_KEPT_BYTES), (_TRIM_THRESHOLD, -1))
    _has_one_heap = _is_told and in_one_heap and _tell((_ARENA_MAX, 1))
    return _is_told


def keep_buffers_of_any_size() -> bool:
    """Have large ones kept as well, where there is one heap; whether they are.

    For when training begins: what a program takes before that to load its data comes in ever other
    sizes, and is of no use later.
    """
    return _has_one_heap and _tell((_MMAP_MAX, 0))


def memory_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Variables for a process that is started to train on CPUs."""
    if _is_chosen(env):
        return {}
    settings = {
        "hugetlb": 1,  # Large pages, where the system has them for who asks.
        "mmap_max": 0,  # No buffer has a mapping of its own, which would end with it.
        "arena_max": 1,  # The others' parts are too small for the buffers of a step.
        "trim_threshold": (1 << 63) - 1,
    }
    return {TUNABLES: ":".join(f"glibc.malloc.{name}={value}" for name, value in settings.items())}


class Unused:
    """Memory that a process keeps and does not use, given back when it has grown.

    What is kept is not always used again: a compiler leaves hundreds of megabytes behind, and a
    small block that stays may come to lie where a large buffer was, which then takes another place.
    """

    def __init__(self) -> None:
        self._peak_bytes = held_bytes()

    def give_back(self) -> bool:
        """Look at what is held, in some microseconds; whether there was something to give.

        For between steps: what they hold while they run may be all that there is to give, so a
        rise counts once.
        """
        now_bytes = held_bytes()
        if now_bytes - self._peak_bytes < _RISE_BYTES:
            return False
        self._peak_bytes = now_bytes
        return _trim()

    def keep_peak(self) -> bool:
        """The same while a step runs: the peak rises by no more than is in use."""
        if held_bytes() - self._peak_bytes < _RISE_BYTES:
            return False
        has_given = _trim()
        self._peak_bytes = max(self._peak_bytes, held_bytes())
        return has_given


def is_kept(env: Mapping[str, str]) -> bool:
    """Whether this process keeps freed memory, by either way."""
    is_started_so = env.get(TUNABLES) == memory_environment({})[TUNABLES]
    return _is_told or (is_started_so and _is_glibc())


def held_bytes() -> int:
    """What this process holds of the machine's memory now."""
    # Not getrusage's peak, which is also that of the process by which this one was started.
    file = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(file, 128).split()[1]) * _PAGE_BYTES
    finally:
        os.close(file)


def _tell(*options: tuple[int, int]) -> bool:
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(number, value) for number, value in options)


def _trim() -> bool:
    return bool(ctypes.CDLL(None).malloc_trim(0))


def _is_chosen(env: Mapping[str, str]) -> bool:
    is_set = any(name == TUNABLES or name.startswith("MALLOC_") for name in env)
    return env.get(KEEP) == "0" or is_set or "malloc" in env.get("LD_PRELOAD", "")


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
