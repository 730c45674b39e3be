"""JAX in several processes: joining, collectives, and what a failure looks like from inside."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from unisono.launch.rendezvous import RendezvousServer

pytestmark = [
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="about JAX's processes"),
    pytest.mark.slow,
]
PROGRAM = Path(__file__).with_name("jax_world_program.py")
TIMEOUT_S = 200


class Run:
    """Processes of one run, without a launcher."""

    def __init__(self, name: str, size: int, folder: Path) -> None:
        secret = secrets.token_hex(8)
        self.folder = folder
        self.meeting = RendezvousServer(size, secret)
        self.processes = []
        for rank in range(size):
            facts = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
            facts |= {"NODE": 0, "NUM_NODES": 1, "COORDINATOR": self.meeting.address}
            env = {k: v for k, v in os.environ.items() if not k.startswith("UNISONO_")}
            env.pop("XLA_FLAGS", None)
            env |= {f"UNISONO_{k}": str(v) for k, v in facts.items()} | {"UNISONO_SECRET": secret}
            output = (folder / f"output-{rank}").open("w")
            with output:
                command = [sys.executable, str(PROGRAM), name, str(folder)]
                self.processes.append(
                    subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
                )

    def wait(self) -> list[int]:
        deadline = time.monotonic() + TIMEOUT_S
        return [p.wait(max(0.1, deadline - time.monotonic())) for p in self.processes]

    def found(self) -> list[Any]:
        """What each process returned; the output of those that failed."""
        codes = self.wait()
        assert not any(codes), self.output()
        files = sorted(self.folder.glob("rank-*.json"))
        return [json.loads(file.read_text()) for file in files]

    def output(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("output-*")))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.meeting.close()


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Iterator[Any]:
    runs = []

    def start(name: str, size: int = 2) -> Run:
        runs.append(Run(name, size, tmp_path_factory.mktemp(name)))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.fixture(scope="module")
def collectives(start) -> list[Any]:
    """What three processes found out about collectives."""
    return start("all_collectives", size=3).found()


def test_every_collective_takes_every_type(collectives):
    assert [found["all_types"] for found in collectives] == [[]] * 3


def test_no_bit_is_lost(collectives):
    assert [found["bits"] for found in collectives] == [[True] * 4] * 3


def test_a_mistake_is_an_error_of_all(collectives):
    for found in collectives:
        shape, dtype, rows, other, splits, op = found["errors"]
        for text in (shape, dtype, rows):
            assert text.startswith("DisagreementError")
            assert "different types or shapes" in text
        assert "rank 1: [['float32', [2]]]; rank 2: [['float32', [3]]]" in shape
        assert "“gather”" in other
        assert "“barrier”" in other
        assert "3 rows to 3 processes by splits=[3, 3, 3]" in splits
        assert op.startswith("StrategyError: Asked to reduce by 'mean'")


def test_some_processes_can_be_a_group(collectives):
    first, second, third = [found["some_ranks"] for found in collectives]
    assert first == [0, 2, 4.0]
    assert third == [1, 2, 4.0]
    assert second.startswith("StrategyError: Asked rank 1 for collectives of the ranks [0, 2]")


@pytest.fixture(scope="module")
def training(start) -> tuple[list[Any], Run]:
    """What two processes found when they trained, and the run."""
    run = start("all_training")
    return run.found(), run


def test_training_gives_what_one_process_gives(training):
    from jax_world_program import make, train

    expected = train(make())
    for found in training[0]:
        for way in found["training"]:
            assert len(way) == len(expected)
            for actual, wanted in zip(way, expected, strict=True):
                np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-5)


def test_values_between_steps_are_those_of_one_process(training):
    assert [found["values_stay_local"] for found in training[0]] == [[True]] * 2


def test_processes_agree_on_a_batch_that_each_computes(training):
    first, second = [found["replicas_agree"] for found in training[0]]
    assert first == second
    assert len(first[1]) == 2


def test_nothing_of_joining_or_leaving_is_printed(training):
    assert "Gloo" not in training[1].output()
    assert "coordination" not in training[1].output()


def test_nothing_of_a_run_is_left(training):
    deadline = time.monotonic() + 10
    while services(training[1]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not services(training[1])


def test_a_lost_process_is_named_as_the_cause(start):
    run = start("is_lost")
    assert run.wait() == [0, -signal.SIGKILL]
    for file in sorted(run.folder.glob("rank-*.json")):
        text, after_s = json.loads(file.read_text())
        assert "another process is gone" in text
        assert after_s < 5


def test_a_process_ends_when_it_is_asked_to(start):
    run = start("is_ended")
    deadline = time.monotonic() + TIMEOUT_S
    while len(list(run.folder.glob("pid-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    # 127.0.0.1, and the same as gRPC writes it.
    loopback = "0100007F"
    assert listening(run) == {loopback, f"0000000000000000FFFF0000{loopback}"}
    assert len(services(run)) == 1
    for process in run.processes:
        process.terminate()
    assert run.wait() == [-signal.SIGTERM] * 2


def listening(run: Run) -> set[str]:
    """The addresses at which the processes of a run, and what they started, listen."""
    own = {str(process.pid) for process in run.processes}
    for file in Path("/proc").glob("[0-9]*/stat"):
        parent = file.read_text().rpartition(")")[2].split()[1] if file.exists() else ""
        own |= {file.parent.name} if parent in own else set()
    links = [link for pid in own for link in Path(f"/proc/{pid}/fd").iterdir()]
    sockets = {os.readlink(link) for link in links if link.is_symlink()}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                found.add(words[1].partition(":")[0])
    return found


def services(run: Run) -> list[int]:
    """Processes that serve JAX in a run, which inherit what it told its own."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_service = (
                b"unisono.backends.jax.coordination_service" in (folder / "cmdline").read_bytes()
            )
            if is_service and run.meeting.address.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found
