"""Worker processes, their channels and shared memory: real processes, a stand-in for the worker."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import stand_in_worker

from unisono.errors import WorkerError
from unisono.launch import workers as workers_module
from unisono.launch.channel import SharedMemory
from unisono.launch.workers import Workers

TIMEOUT_S = 30.0
MIB = 1 << 20


@pytest.fixture
def start():
    """Starts workers that are ended with the test."""
    groups = []

    def start(size, *arguments, envs=None):
        group = Workers("stand_in_worker", size, arguments, envs or [{}] * (size - 1))
        groups.append(group)
        return group

    yield start
    for group in groups:
        group.kill()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"  # Ended, though nobody has asked for its exit code yet.


def ended_within(pids, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(is_running(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class TestWorkers:
    def test_each_knows_who_it_is(self, start):
        workers = start(3, "one", "two", envs=[{"STAND_IN": "a"}, {"STAND_IN": "b"}])
        workers.send(("who",))
        (args1, env1, pid1, sid1), (args2, env2, pid2, sid2) = workers.receive(TIMEOUT_S)
        assert args1 == ["1", "3", "one", "two"]
        assert args2 == ["2", "3", "one", "two"]
        assert (env1, env2) == ("a", "b")
        assert [worker.pid for worker in workers] == [pid1, pid2]
        assert [worker.rank for worker in workers] == [1, 2]
        # A session each: a Ctrl-C at the terminal reaches this process alone.
        assert (sid1, sid2) == (pid1, pid2)
        assert workers.are_alive

    def test_modules_are_found_where_this_process_finds_them(self, start, monkeypatch, tmp_path):
        monkeypatch.syspath_prepend(str(tmp_path))
        workers = start(2)
        workers.send(("path",))
        (path,) = workers.receive(TIMEOUT_S)
        assert str(tmp_path) in path
        assert str(Path(stand_in_worker.__file__).parent) in path

    def test_messages_of_all_come_in_rank_order(self, start):
        workers = start(3)
        for i in range(3):
            workers.send(("echo", i, "x" * i))
        for i in range(3):
            assert workers.receive(TIMEOUT_S) == [[i, "x" * i]] * 2

    def test_memory_larger_than_a_small_dev_shm(self, start):
        workers = start(2)
        memory = SharedMemory.create(80 * MIB)
        memory.buffer[:4], memory.buffer[-4:] = b"head", b"tail"
        workers.send(("memory",))
        for worker in workers:
            worker.channel.send_memory(memory)
        assert workers.receive(TIMEOUT_S) == [(80 * MIB, b"head", b"tail")]
        assert workers.receive(TIMEOUT_S) == ["written"]
        assert memory.buffer[-4:] == b"back"
        memory.close()

    def test_pending_takes_whoever_speaks_first(self, start):
        workers = start(3)
        assert workers.pending(timeout_s=0.1) is None
        workers.send(("echo_if_rank", 2))
        worker, message = workers.pending(timeout_s=TIMEOUT_S)
        assert (worker.rank, message) == (2, [2])

    def test_pending_does_not_wait_for_the_dead(self, start):
        workers = start(2)
        workers.send(("exit", 0))
        began = time.monotonic()
        assert workers.pending(timeout_s=TIMEOUT_S) is None
        assert time.monotonic() - began < TIMEOUT_S / 2
        for worker in workers:
            worker.wait(TIMEOUT_S)
        assert not workers.are_alive

    def test_a_group_of_one_has_no_workers(self, start):
        workers = start(1)
        assert list(workers) == []
        assert workers.receive(0.1) == []
        assert not workers.are_alive


class TestDeath:
    @pytest.mark.parametrize(
        ("message", "how"),
        [
            (("signal", signal.SIGKILL), "was ended by SIGKILL"),
            (("signal", signal.SIGSEGV), "was ended by SIGSEGV"),
            (("exit", 3), "exited with code 3"),
            (("raise", "no such thing"), "exited with code 1"),
        ],
    )
    def test_it_is_reported_with_its_cause_and_last_words(self, start, message, how):
        workers = start(3)
        workers.send(("echo",))
        workers.receive(TIMEOUT_S)
        first, second = workers
        second.channel.send(("print", *(f"line {i}." for i in range(30))))
        second.channel.send(message)
        first.channel.send(("echo", "alive"))
        with pytest.raises(WorkerError) as caught:
            workers.receive(TIMEOUT_S)
        text = str(caught.value)
        assert text.startswith(f"Replica 2 (process {second.pid}) {how}. Its last output:\n")
        words = text.splitlines()[1:]
        assert len(words) == 20
        if message[0] == "raise":
            assert words[-1] == "RuntimeError: no such thing"
        else:
            assert words == [f"line {i}." for i in range(10, 30)]
        assert "line 9." not in words
        assert first.is_alive
        assert not second.is_alive

    def test_a_signal_without_a_name(self, start):
        workers = start(2)
        workers.send(("echo",))
        workers.receive(TIMEOUT_S)
        (worker,) = workers
        os.kill(worker.pid, signal.SIGRTMIN + 3)
        with pytest.raises(WorkerError, match=f"was ended by signal {signal.SIGRTMIN + 3}"):
            workers.receive(TIMEOUT_S)

    def test_sending_to_the_dead(self, start):
        workers = start(2)
        (worker,) = workers
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait(TIMEOUT_S)
        with pytest.raises(WorkerError, match=r"^Replica 1 \(process \d+\) was ended by SIGKILL"):
            workers.send(("echo",))

    def test_a_module_that_is_not_there(self):
        workers = Workers("no_such_worker", 2, [], [{}])
        try:
            with pytest.raises(WorkerError, match="No module named no_such_worker"):
                workers.receive(TIMEOUT_S)
        finally:
            workers.end()

    def test_silence_is_reported_after_the_time_given(self, start):
        workers = start(2)
        workers.send(("wait", 60))
        assert workers.receive(TIMEOUT_S) == ["waiting"]
        with pytest.raises(WorkerError, match=r"^Replica 1 \(process \d+\) does not answer\."):
            workers.receive(0.2)
        assert workers.are_alive


class TestEnd:
    def test_end_lets_them_leave_by_themselves(self, start):
        workers = start(3)
        workers.send(("echo",))
        workers.receive(TIMEOUT_S)
        processes = [worker._process for worker in workers]
        workers.end()
        # Two ways out by themselves: the main loop and the lifeline both see the line end.
        assert all(process.returncode in (0, 1) for process in processes)
        assert list(workers) == []
        workers.end()

    def test_end_and_kill_leave_no_process(self, start):
        for way in ("end", "kill"):
            workers = start(3)
            workers.send(("wait", 60))
            workers.receive(TIMEOUT_S)
            pids = [worker.pid for worker in workers]
            began = time.monotonic()
            getattr(workers, way)()
            assert time.monotonic() - began < 5.0
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
            assert not workers.are_alive

    def test_end_kills_one_that_cannot_leave(self, start, monkeypatch):
        monkeypatch.setattr(workers_module, "_END_TIMEOUT_S", 0.5)
        workers = start(2, "without a lifeline")
        workers.send(("wait", 60))
        workers.receive(TIMEOUT_S)
        (worker,) = workers
        workers.end()
        assert worker._process.returncode == -signal.SIGKILL

    def test_a_group_that_cannot_start_leaves_no_process(self, monkeypatch):
        started = []

        class Recorded(workers_module.WorkerProcess):
            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                started.append(self)

        monkeypatch.setattr(workers_module, "WorkerProcess", Recorded)
        with pytest.raises(TypeError):
            Workers("stand_in_worker", 3, [], [{}, {"NOT_TEXT": 1}])
        assert len(started) == 1
        assert not started[0].is_alive

    def test_no_files_stay_open(self, start):
        before = len(os.listdir("/proc/self/fd"))
        for way in ("end", "kill"):
            getattr(start(3), way)()
        assert len(os.listdir("/proc/self/fd")) == before


PARENT = """
import os, sys, time
from unisono.launch.workers import Workers

workers = Workers("stand_in_worker", 3, [], [{{}}, {{}}])
workers.send(("echo",))
workers.receive(30)
{extra}
print(*[worker.pid for worker in workers], flush=True)
time.sleep(120)
"""


@contextlib.contextmanager
def parent_with_workers(extra: str = ""):
    """A process that has started two workers, and the process ids of these."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(extra=extra)],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield parent, [int(word) for word in parent.stdout.readline().split()]
    finally:
        # Also what the parent itself forked; the workers are in sessions of their own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait(TIMEOUT_S)
        parent.stdout.close()


class TestParentIsGone:
    @pytest.mark.parametrize(
        ("situation", "extra"),
        [
            ("idle", ""),
            ("busy", "workers.send(('wait', 100)); workers.receive(30)"),
            (
                "busy, with messages unread",
                "workers.send(('wait', 100)); workers.receive(30); workers.send(('echo', 1))",
            ),
            (
                "the line is held open by a process that the parent forked",
                "if os.fork() == 0: time.sleep(100)",
            ),
        ],
        ids=["idle", "busy", "unread", "forked"],
    )
    def test_workers_end_with_a_parent_that_was_killed(self, situation, extra):
        with parent_with_workers(extra) as (parent, pids):
            assert len(pids) == 2
            assert all(is_running(pid) for pid in pids)
            os.kill(parent.pid, signal.SIGKILL)
            parent.wait(TIMEOUT_S)
            assert ended_within(pids, 5.0), f"still running although {situation}: {pids}"

    def test_workers_end_with_a_parent_that_forgot_them(self):
        leave = "print(*[worker.pid for worker in workers], flush=True); os._exit(0)"
        with parent_with_workers(leave) as (parent, pids):
            assert len(pids) == 2
            assert parent.wait(TIMEOUT_S) == 0
            assert ended_within(pids, 5.0)
