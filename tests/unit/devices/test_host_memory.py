"""Freed memory stays in the process where CPUs train, unless a user has chosen otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.devices.host_memory import keep_freed_memory, memory_environment

# How often the system had to clear a page while large buffers came and went.
BUFFERS = """
import resource, threading
{first}
def churn():
    for _ in range(4):
        [bytearray({size}) for _ in range(8)]
def run():
    thread = threading.Thread(target=churn)
    thread.start()
    thread.join()
{call}()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
{call}()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def num_cleared(
    first: str, size: int = 20_000_000, *, is_threaded: bool = False, **env: str
) -> int:
    call = "run" if is_threaded else "churn"
    return cleared_by(BUFFERS.format(first=first, size=size, call=call), **env)


def cleared_by(program: str, **env: str) -> int:
    chosen = ("UNISONO_", "MALLOC_", "GLIBC_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(chosen)}
    done = subprocess.run(
        [sys.executable, "-c", program],
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
    "env", [{"UNISONO_KEEP_MEMORY": "0"}, {"MALLOC_MMAP_THRESHOLD_": "1000000"}]
)
def test_a_user_may_choose_otherwise(env):
    assert num_cleared("import unisono", **env) > 1000


def test_larger_buffers_are_used_again_where_we_start_a_process():
    size = 80_000_000
    plain = num_cleared("", size)
    assert num_cleared("", size, **memory_environment({})) < plain / 20


TRAINING = "import unisono; from unisono.devices import host_memory as memory; "
TRAINING += "memory.keep_buffers_of_any_size()"


@pytest.mark.parametrize("is_threaded", [False, True])
def test_larger_buffers_are_used_again_on_jax_once_it_trains(is_threaded):
    size = 80_000_000
    plain = num_cleared("", size, is_threaded=is_threaded)
    kept = num_cleared(TRAINING, size, is_threaded=is_threaded, KERAS_BACKEND="jax")
    assert kept < plain / 20


@pytest.mark.parametrize(
    ("first", "env"),
    [
        ("import unisono", {"KERAS_BACKEND": "jax"}),
        (TRAINING, {"KERAS_BACKEND": "torch"}),
        (TRAINING, {"KERAS_BACKEND": "jax", "UNISONO_KEEP_MEMORY": "0"}),
    ],
)
def test_and_not_otherwise(first, env):
    size = 80_000_000
    assert num_cleared(first, size, **env) > num_cleared("", size) / 2


@pytest.mark.skipif(
    not LARGE_PAGES.exists() or "[madvise]" not in LARGE_PAGES.read_text(),
    reason="this system has large pages for everybody, or for nobody",
)
def test_they_come_in_large_pages():
    size = 80_000_000
    first = f"kept = bytearray(b'x') * {size}; print(resource.getrusage(0).ru_minflt - start)"
    program = f"import resource; start = resource.getrusage(0).ru_minflt; {first}"
    num_small = size // 4096
    assert cleared_by(program) > num_small / 2
    assert cleared_by(program, **memory_environment({})) < num_small / 20


# A buffer that is freed below a block that stays, and how much of it the process still holds.
UNUSED = """
from unisono.devices.host_memory import Unused, held_bytes as held
unused = Unused()
assert not unused.give_back()  # There was nothing yet.
before = held()
large, stays = bytearray(b"x") * 200_000_000, bytearray(b"x") * 2_000_000
del large
kept = held() - before
assert unused.give_back()
assert not unused.give_back()  # It is gone.
print(kept - (held() - before))
"""


def test_what_is_unused_is_given_back_once_the_peak_has_risen():
    """Whatever the process held by which this one was started."""
    large = bytearray(b"x") * 400_000_000
    assert cleared_by(UNUSED, **memory_environment({})) == pytest.approx(200_000_000, rel=0.05)
    del large


# A large buffer in another place than the last one, which is given back as soon as that is seen.
MOVED = """
from unisono.devices.host_memory import Unused, held_bytes as held
unused = Unused()
large, stays = bytearray(b"x") * 300_000_000, bytearray(b"x") * 2_000_000
unused.keep_peak()
peak = held()  # All of it is in use.
del large
moved = bytearray(b"x") * 400_000_000
assert held() - peak > 390_000_000
assert unused.keep_peak()
assert not unused.keep_peak()  # What is held is in use, and the new peak.
print(held() - peak)
"""


def test_a_buffer_that_moves_does_not_add_to_the_peak():
    risen = cleared_by(MOVED, **memory_environment({}))
    assert risen == pytest.approx(100_000_000, rel=0.05)


@pytest.mark.parametrize(
    ("env", "keeps"),
    [
        ({}, True),
        (memory_environment({}), True),
        ({"UNISONO_KEEP_MEMORY": "0"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}, False),
    ],
)
def test_who_keeps_freed_memory(env, keeps):
    program = "import os, unisono\nfrom unisono.devices import host_memory\n"
    program += "print(int(host_memory.is_kept(os.environ)))"
    assert cleared_by(program, **env) == keeps


@pytest.mark.parametrize(
    "env",
    [
        {"UNISONO_KEEP_MEMORY": "0"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"},
        {"MALLOC_ARENA_MAX": "2"},
        {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"},
    ],
)
def test_nothing_is_set_then(env):
    assert keep_freed_memory(env) is False
    assert memory_environment(env) == {}
