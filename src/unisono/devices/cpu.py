"""How much of this machine's CPU and memory this process may use: affinity and cgroup limits."""

import math
import os
import platform
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def num_cores() -> int:
    """The cores that this process may use; a fraction of a core counts as one."""
    allowed = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


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
