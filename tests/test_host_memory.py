"""Freed memory stays in the process where CPUs train, unless a user has chosen otherwise."""

import os
import subprocess
import sys

import pytest

from unisono.devices.host_memory import keep_freed_memory

# How often the system had to clear a page while large buffers came and went.
BUFFERS = """
import resource, sys
{first}
def churn():
    for _ in range(20):
        bytearray(60_000_000)
churn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
churn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def num_cleared(first: str, **env: str) -> int:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("UNISONO_", "MALLOC_"))}
    done = subprocess.run(
        [sys.executable, "-c", BUFFERS.format(first=first)],
        env=inherited | env,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_buffers_are_used_again():
    plain = num_cleared("")
    assert plain > 1000
    assert num_cleared("import unisono") < plain / 20


@pytest.mark.parametrize(
    "env", [{"UNISONO_KEEP_MEMORY": "0"}, {"MALLOC_TRIM_THRESHOLD_": "1000000"}]
)
def test_a_user_may_choose_otherwise(env):
    assert num_cleared("import unisono", **env) > 1000


@pytest.mark.parametrize(
    "env",
    [
        {"UNISONO_KEEP_MEMORY": "0"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"},
        {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"},
    ],
)
def test_nothing_is_set_then(env):
    assert keep_freed_memory(env) is False
