"""What `unisono run` sets in the processes that it starts on CPUs, besides their rank.

- Cores: each process is pinned to neighbouring cores of its own. Two processes that share all
  cores are far slower than two that have half of them each.
- Threads: one per core for OpenMP, MKL, OpenBLAS and TensorFlow (`*_NUM_THREADS`); XLA counts the
  cores that it may run on, and gets `PJRT_NPROC` where processes are not pinned.
- Memory: `GLIBC_TUNABLES` lets malloc keep freed buffers, in large pages, instead of returning them
  to the system after each step, which took up to half of a step's time on JAX.

A variable that the user has set stays as it is. `UNISONO_CPU_TUNING=0` switches all of it off.
Values never depend on it. Processes on GPUs get none of it but the number of library threads, and
the cores of their GPU's socket (plan.py).
"""

import itertools
from collections.abc import Mapping, Sequence

SWITCH = "UNISONO_CPU_TUNING"
TUNABLES = "GLIBC_TUNABLES"

_LIBRARY_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_TENSORFLOW_THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
_XLA_THREADS = ("PJRT_NPROC",)
_MALLOC = {
    "hugetlb": 1,  # Large pages, where the system offers them on request (madvise).
    "mmap_max": 0,  # No buffer gets a mapping of its own, which would be unmapped with it.
    "arena_max": 1,  # Other arenas are too small for the buffers of a step.
    "trim_threshold": (1 << 63) - 1,
}


def is_tuned(env: Mapping[str, str]) -> bool:
    """Whether CPU processes started with this environment are tuned."""
    return env.get(SWITCH) != "0"


def split_cores(cores: Sequence[int], num_processes: int) -> list[tuple[int, ...]]:
    """Neighbouring cores for each process; an empty list where there are not enough of them."""
    if len(cores) < num_processes:
        return []
    bounds = [i * len(cores) // num_processes for i in range(num_processes + 1)]
    return [tuple(cores[first:last]) for first, last in itertools.pairwise(bounds)]


def thread_environment(count: int, *, is_on_gpus: bool, is_pinned: bool) -> dict[str, str]:
    """Numbers of threads, by the variables that libraries read."""
    names: tuple[str, ...] = _LIBRARY_THREADS
    if not is_on_gpus:
        names += _TENSORFLOW_THREADS if is_pinned else _TENSORFLOW_THREADS + _XLA_THREADS
    return dict.fromkeys(names, str(count))


def malloc_environment(env: Mapping[str, str]) -> dict[str, str]:
    """glibc's tunables; none where the user has chosen an allocator or its settings."""
    is_chosen = any(name == TUNABLES or name.startswith("MALLOC_") for name in env)
    if is_chosen or "malloc" in env.get("LD_PRELOAD", "") or not is_tuned(env):
        return {}
    return {TUNABLES: ":".join(f"glibc.malloc.{name}={value}" for name, value in _MALLOC.items())}
