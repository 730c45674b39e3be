"""How much of this machine's CPU and memory this process may use, and gets.

By affinity and cgroup limits, and by what Linux counts for each thread.
"""

import math
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def num_cores() -> int:
    """The cores that this process may use; a fraction of a core counts as one."""
    allowed = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


@dataclass(frozen=True)
class CoreUse:
    """How this process used its cores for a while."""

    used: float
    """Processor time per second: the number of cores that computed."""
    waited: float
    """The number of cores that it could have used as well and other programs did."""

    @property
    def wait(self) -> float:
        """The fraction of the processor time that it needed and did not get."""
        # A process that hardly computes may wait for each of its few moments.
        return self.waited / (self.used + self.waited) if self.waited > 0.1 else 0.0


class CoreMeter:
    """Measures the time in which threads of this process were ready to run and had no core.

    Threads also wait for each other. So only as much counts as the process left of its cores.
    """

    def __init__(self) -> None:
        self._num_cores = num_cores()
        self._at, self._cpu_s, self._delays = self._now()

    def read(self) -> CoreUse:
        """The use since the last call."""
        at, cpu_s, delays = self._now()
        past_s = max(at - self._at, 1e-9)
        used = (cpu_s - self._cpu_s) / past_s
        late = sum(ns - self._delays.get(thread, 0) for thread, ns in delays.items()) / 1e9 / past_s
        self._at, self._cpu_s, self._delays = at, cpu_s, delays
        return CoreUse(used, max(0.0, min(late, self._num_cores - used)))

    def _now(self) -> tuple[float, float, dict[str, int]]:
        delays = {}
        for task in (_PROC / "self" / "task").iterdir():
            words = "".join(_lines(task / "schedstat")).split()
            if len(words) == 3:  # Kernels may be built without it.
                delays[task.name] = int(words[1])
        return time.perf_counter(), time.process_time(), delays


def memory_bytes() -> tuple[int | None, int | None]:
    """Total and available memory, of the container where one sets a limit."""
    facts = dict(line.split(":", 1) for line in _lines(_PROC / "meminfo") if ":" in line)
    total, free = (_kilobytes(facts.get(key)) for key in ("MemTotal", "MemAvailable"))
    limit, used = _memory_limit()
    if limit is None or total is None or limit >= total:
        return total, free
    left = limit - (used or 0)
    return limit, max(0, left if free is None else min(left, free))


def num_memory_kills() -> int | None:
    """How often the kernel has killed for want of memory: here if that is counted, or at all."""
    for folder in _cgroup_folders("", "memory"):
        for name in ("memory.events", "memory.oom_control"):
            facts = dict(line.split() for line in _lines(folder / name))
            if "oom_kill" in facts:
                return int(facts["oom_kill"])
    facts = dict(line.split() for line in _lines(_PROC / "vmstat"))
    return int(facts["oom_kill"]) if "oom_kill" in facts else None


def cpu_name() -> str:
    """The CPU's model, or at least its architecture."""
    for line in _lines(_PROC / "cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine() or "cpu"


def _cpu_quota() -> float | None:
    """The CPU quota of the container in cores, by cgroup v2 or v1."""
    found = []
    for folder in _cgroup_folders("", "cpu"):
        text = _lines(folder / "cpu.max")
        if text:
            quota, period = text[0].split()
        else:
            quota = "".join(_lines(folder / "cpu.cfs_quota_us"))
            period = "".join(_lines(folder / "cpu.cfs_period_us"))
        if quota.isdigit() and period.isdigit() and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def _memory_limit() -> tuple[int | None, int | None]:
    """The container's limit and what is used of it, in bytes."""
    names = [("memory.max", "memory.current")]
    names += [("memory.limit_in_bytes", "memory.usage_in_bytes")]
    found = []
    for folder in _cgroup_folders("", "memory"):
        for limit_name, used_name in names:
            limit, used = (_number(folder / name) for name in (limit_name, used_name))
            if limit is not None:
                found.append((limit, used))
    return min(found, default=(None, None), key=lambda pair: pair[0] or 0)


def _cgroup_folders(*controllers: str) -> list[Path]:
    """The folders of this process' control groups, each with those above it."""
    folders = []
    for line in _lines(_PROC / "self" / "cgroup"):
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            if name not in controllers:
                continue
            root = _CGROUP / name if name else _CGROUP
            inner = root / path.lstrip("/")
            folders += [inner, *(above for above in inner.parents if above.is_relative_to(root))]
    return folders


def _number(path: Path) -> int | None:
    text = "".join(_lines(path))
    return int(text) if text.isdigit() else None


def _kilobytes(text: str | None) -> int | None:
    return None if text is None else int(text.split()[0]) * 1024


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
