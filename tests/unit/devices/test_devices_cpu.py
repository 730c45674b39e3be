"""How much of a machine a container leaves: cores and memory by affinity and control groups."""

import os
import subprocess
import sys

import pytest

from unisono.devices import cpu

GIB = 2**30


BUSY = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
MEASURE = """
import os, sys, time
from unisono.devices.cpu import CoreMeter
os.sched_setaffinity(0, {int(sys.argv[1])})
meter, end = CoreMeter(), time.perf_counter() + 1
while time.perf_counter() < end: pass
print(meter.read().wait)
"""


def test_processor_time_that_another_program_takes_is_measured():
    core = str(min(os.sched_getaffinity(0)))
    with subprocess.Popen([sys.executable, "-c", BUSY, core]) as other:
        words = [sys.executable, "-c", MEASURE, core]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        other.kill()
    assert 0.3 < float(done.stdout) < 0.99


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with eight cores and 16 GiB, of which 12 are free; files set further limits."""

    def build(cgroup: str, **limits: str) -> None:
        files = {
            "proc/meminfo": f"MemTotal: {16 * 2**20} kB\nMemAvailable: {12 * 2**20} kB\n",
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: Stand-in CPU\n",
            "proc/self/cgroup": cgroup,
        }
        for path, text in {**files, **limits}.items():
            place = tmp_path / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)

    monkeypatch.setattr(cpu, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(cpu, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return build


def test_no_limit(machine):
    machine("0::/\n", **{"cgroup/cpu.max": "max 100000\n", "cgroup/memory.max": "max\n"})
    assert cpu.num_cores() == 8
    assert cpu.memory_bytes() == (16 * GIB, 12 * GIB)
    assert cpu.cpu_name() == "Stand-in CPU"


@pytest.mark.parametrize(("quota", "cores"), [(50000, 1), (150000, 2), (400000, 4), (9900000, 8)])
def test_a_share_of_the_cores(machine, quota, cores):
    machine("0::/\n", **{"cgroup/cpu.max": f"{quota} 100000\n"})
    assert cpu.num_cores() == cores


def test_the_tightest_limit_of_all_groups_above(machine):
    machine(
        "0::/outer/inner\n",
        **{
            "cgroup/outer/cpu.max": "200000 100000\n",
            "cgroup/outer/inner/cpu.max": "max 100000\n",
            "cgroup/outer/memory.max": f"{4 * GIB}\n",
            "cgroup/outer/memory.current": f"{GIB}\n",
            "cgroup/outer/inner/memory.max": f"{8 * GIB}\n",
            "cgroup/outer/inner/memory.current": "0\n",
        },
    )
    assert cpu.num_cores() == 2
    assert cpu.memory_bytes() == (4 * GIB, 3 * GIB)


def test_control_groups_of_the_first_version(machine):
    machine(
        "4:memory:/job\n1:cpu,cpuacct:/job\n",
        **{
            "cgroup/cpu/job/cpu.cfs_quota_us": "300000\n",
            "cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            "cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "cgroup/memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
            "cgroup/memory/job/memory.usage_in_bytes": f"{3 * GIB}\n",
            "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert cpu.num_cores() == 3
    assert cpu.memory_bytes() == (2 * GIB, 0)


def test_a_system_that_tells_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "_PROC", tmp_path)
    monkeypatch.setattr(cpu, "_CGROUP", tmp_path)
    assert cpu.memory_bytes() == (None, None)
    assert cpu.num_cores() >= 1
    assert cpu.cpu_name()


@pytest.mark.parametrize(
    ("cgroup", "files", "count"),
    [
        ("0::/\n", {"cgroup/memory.events": "low 0\noom 3\noom_kill 2\n"}, 2),
        (
            "4:memory:/job\n",
            {"cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\noom_kill 5\n"},
            5,
        ),
        ("0::/\n", {"proc/vmstat": "nr_free_pages 9\noom_kill 7\n"}, 7),
        ("0::/\n", {}, None),
    ],
)
def test_how_often_the_kernel_killed_for_want_of_memory(machine, cgroup, files, count):
    machine(cgroup, **files)
    assert cpu.num_memory_kills() == count
