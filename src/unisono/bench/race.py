"""Interleaved rounds of several ways to train one net: ratios are taken within a round.

Every way has processes of its own, warmed up before the first round; in a round each way trains one
pass while all others wait. Machines drift, rounds do not.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from unisono.bench.nets import NUM_STEPS, PER_REPLICA
from unisono.devices import Policy
from unisono.errors import BenchError
from unisono.launch.cpu_environment import TUNABLES
from unisono.launch.network import free_port
from unisono.launch.orphan_reaper import OrphanReaper
from unisono.launch.plan import assign_resources
from unisono.scratch import temporary_folder

_POLL_S = 0.02
_MOST_WORDS = 300
_RACER = "unisono.bench.racer"
_OURS = ("one", "together", "inside")


@dataclass(frozen=True)
class Way:
    """One way to train, with so many replicas."""

    kind: str
    """`plain`, `one`, `apart`, `together`, `inside`, or the name of a peer."""
    num_replicas: int
    """Whose rows a step trains on; `plain` and `one` do so on one replica."""
    num_processes: int
    is_launched: bool = False
    """By `unisono run`; else each process is pinned to its cores here."""

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.num_replicas}"


@dataclass
class Lap:
    """What one way did in one round."""

    images_per_s: float
    seconds: float
    cpu_s: float | None = None
    peak_bytes: int | None = None
    waited_s: float = 0.0
    """Of the pass, on the others, by the mean process."""
    slowest_wait_s: float = 0.0
    """By the process that waited least: the one that the others waited for."""
    input_s: float = 0.0
    """What the batches of a pass take by themselves."""


@dataclass
class Race:
    """The laps of each way, round by round."""

    net: str
    backend: str
    laps: dict[str, list[Lap]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    load: float = 0.0


def run_race(
    net: str,
    backend: str,
    ways: Sequence[Way],
    rounds: int,
    tell: Callable[[str], None] = lambda text: None,
) -> Race:
    """Race all ways; one that cannot start is left out; why, and when one ends early, is said.

    `tell` hears what is done next.
    """
    race = Race(net, backend, load=os.getloadavg()[0])
    with temporary_folder("unisono-bench-") as folder, contextlib.ExitStack() as st:
        reaper = st.enter_context(contextlib.closing(OrphanReaper()))
        running = []
        for place, way in enumerate(ways, 1):
            tell(f"{net}, {backend}: warming up {way.name} ({place} of {len(ways)})")
            # One after the other: a warm-up beside another one's would share its cores.
            processes = st.enter_context(_started(way, net, backend, folder, reaper))
            try:
                _collect(folder, f"{way.name}-ready", way.num_processes, processes)
            except BenchError as error:
                race.failed[way.name] = str(error)
                continue
            running.append((way, processes))
            race.laps[way.name] = []
        for number, (way, processes) in itertools.product(range(rounds), running):
            if way.name in race.failed:
                continue
            tell(f"{net}, {backend}: round {number + 1} of {rounds}, {way.name}")
            (folder / f"{way.name}-{number}").touch()
            try:
                told = _collect(folder, f"{way.name}-{number}", way.num_processes, processes)
            except BenchError as error:
                race.failed[way.name] = f"In round {number + 1}: {error}"
                for process in processes:  # The others may wait for it, and take cores for that.
                    _kill(process)
                if not race.laps[way.name]:
                    del race.laps[way.name]
                continue
            race.laps[way.name].append(_lap(way, net, [json.loads(text) for text in told]))
        (folder / "end").touch()
    return race


def _lap(way: Way, net: str, told: list[dict[str, float]]) -> Lap:
    seconds = sum(each["seconds"] for each in told) / len(told)
    num_images = PER_REPLICA[net] * NUM_STEPS[net] * way.num_replicas
    waits = [each.get("waited_s", 0.0) for each in told]
    return Lap(
        images_per_s=num_images / seconds,
        seconds=seconds,
        cpu_s=sum(each["cpu_s"] for each in told),
        peak_bytes=max(int(each["peak_bytes"]) for each in told),
        waited_s=sum(waits) / len(waits),
        slowest_wait_s=min(waits),
        input_s=max(each.get("input_s", 0.0) for each in told),
    )


@contextlib.contextmanager
def _started(
    way: Way, net: str, backend: str, folder: Path, reaper: OrphanReaper
) -> "Iterator[list[subprocess.Popen[bytes]]]":
    # Of those that never talk, each trains as if there were no other.
    num_replicas = 1 if way.kind == "apart" else way.num_replicas
    words = [str(folder), way.name, net, str(NUM_STEPS[net]), str(num_replicas)]
    env = _environment(way, backend, folder)
    log = (folder / f"{way.name}.log").open("wb")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        if way.is_launched:
            launcher = [sys.executable, "-m", "unisono", "run", "--replicas"]
            command = [*launcher, str(way.num_processes), "-m", _RACER, *words]
            processes.append(_start(command, env, log, reaper))
        else:
            _start_pinned(processes, way, words, env, log, reaper)
        yield processes
    except BaseException:
        for process in processes:  # Nobody waits for the end of a pass any more.
            _kill(process)
        raise
    finally:
        (folder / "end").touch()
        for process in processes:
            _end(process)
            reaper.forget(process.pid)
        log.close()


def _start(
    command: list[str], env: dict[str, str], log: IO[bytes], reaper: OrphanReaper
) -> "subprocess.Popen[bytes]":
    """A process that ends with this one, however that ends."""
    process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    reaper.watch(process.pid)
    return process


def _start_pinned(
    processes: "list[subprocess.Popen[bytes]]",
    way: Way,
    words: list[str],
    env: dict[str, str],
    log: IO[bytes],
    reaper: OrphanReaper,
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    places = assign_resources(
        way.num_processes,
        gpus=None,
        cores=cores,
        num_cores=len(cores),
        policy=Policy(),
        given=os.environ,
    )
    for rank, seat in enumerate(places):
        # One process of all cores keeps what its framework does by itself.
        own = dict(seat.env) if way.num_processes > 1 else {}
        own.pop(TUNABLES, None)  # What we do for our own processes is part of what is measured.
        command = [sys.executable, "-m", _RACER, *words]
        process = _start(command, env | own | {"BENCH_RANK": str(rank)}, log, reaper)
        processes.append(process)
        # Before it has imported anything: threads inherit the cores of who starts them.
        if seat.cores:
            os.sched_setaffinity(process.pid, seat.cores)


def _environment(way: Way, backend: str, folder: Path) -> dict[str, str]:
    env = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    env |= {"BENCH_STORE": str(folder / f"{way.name}.store"), "UNISONO_RUNS": ""}
    if way.kind == "distribution":
        count = f"--xla_force_host_platform_device_count={way.num_replicas}"
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {count}".strip()
    if way.kind == "multiworker":
        ports = [free_port() for _ in range(way.num_processes)]
        env["BENCH_ADDRESSES"] = json.dumps([f"127.0.0.1:{port}" for port in ports])
    return env


def _collect(
    folder: Path, name: str, count: int, processes: "list[subprocess.Popen[bytes]]"
) -> list[str]:
    """What each process has written, once all have."""
    files = [folder / f"{name}-{rank}" for rank in range(count)]
    while not all(file.exists() for file in files):
        ended = [process.returncode for process in processes if process.poll() is not None]
        if ended:
            log = folder / f"{'-'.join(name.split('-')[:2])}.log"
            last = last_words(log.read_text(errors="replace"))
            raise BenchError(f"A process ended with code {ended[0]}: {last}")
        time.sleep(_POLL_S)
    return [file.read_text() for file in files]


def last_words(log: str) -> str:
    """The last line that tells something: XLA ends with the frames of its stack."""
    lines = [line for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith((" ", "***"))]
    return (telling or lines or [""])[-1].strip()[:_MOST_WORDS]


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        _kill(process)
        process.wait()


def _kill(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
