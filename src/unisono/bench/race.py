"""Interleaved rounds of several ways to train one net.

Every way has its own processes, which are warmed up first. In a round each way trains one pass
while all others wait, and ratios are taken within a round: a machine's speed drifts over minutes.
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
from unisono.bench.peers import PEERS
from unisono.devices import Policy
from unisono.devices.cpu_layers import SWITCH
from unisono.errors import LaunchError
from unisono.launch.cpu_environment import TUNABLES
from unisono.launch.network import LOOPBACK, free_port, interface_of
from unisono.launch.orphan_reaper import OrphanReaper
from unisono.launch.plan import assign_resources
from unisono.scratch import temporary_folder

_POLL_S = 0.02
_MAX_LENGTH = 300
_RACER = "unisono.bench.racer"
_OURS = ("one", "together", "inside")


@dataclass(frozen=True)
class Way:
    """One way to train on a number of replicas."""

    kind: str
    """`plain`, `one`, `apart`, `together`, `inside`, or the name of a peer."""
    num_replicas: int
    """The global batch is that of as many replicas; `plain` and `one` train it on one."""
    num_processes: int
    is_launched: bool = False
    """By `unisono run`; else each process is pinned to its cores here."""
    variant: str = ""
    """A short name for the choice of `cpu_layers`."""
    cpu_layers: str | None = None
    """The value of UNISONO_CPU_LAYERS; None leaves it unset."""

    @property
    def name(self) -> str:
        variant = f":{self.variant}" if self.variant else ""
        return f"{self.kind}{variant}-{self.num_replicas}"


@dataclass
class Lap:
    """One pass of one way."""

    images_per_s: float
    seconds: float
    cpu_s: float | None = None
    peak_bytes: int | None = None
    waited_s: float = 0.0
    """How long the mean process waited for the others."""
    slowest_wait_s: float = 0.0
    """How long the slowest process waited: the one that waited least."""
    input_s: float = 0.0
    """How long the batches of a pass take without training."""


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
    """Race all ways. Those that cannot start or that end early are in `failed`, with the reason.

    `tell` is called with what is done next.
    """
    race = Race(net, backend, load=os.getloadavg()[0])
    with temporary_folder("unisono-bench-") as folder, contextlib.ExitStack() as st:
        reaper = st.enter_context(contextlib.closing(OrphanReaper()))
        running = []
        for place, way in enumerate(ways, 1):
            tell(f"{net}, {backend}: warming up {way.name} ({place} of {len(ways)})")
            # One after the other, so that a warm-up has all cores.
            processes = st.enter_context(_started(way, net, backend, folder, reaper))
            try:
                _collect(folder, f"{way.name}-ready", way.num_processes, processes)
            except LaunchError as error:
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
                written = _collect(folder, f"{way.name}-{number}", way.num_processes, processes)
            except LaunchError as error:
                race.failed[way.name] = f"In round {number + 1}: {error}"
                for process in processes:  # The others may wait for it and use cores.
                    _kill(process)
                if not race.laps[way.name]:
                    del race.laps[way.name]
                continue
            race.laps[way.name].append(_lap(way, net, [json.loads(text) for text in written]))
        (folder / "end").touch()
    return race


def _lap(way: Way, net: str, measured: list[dict[str, float]]) -> Lap:
    seconds = sum(each["seconds"] for each in measured) / len(measured)
    num_images = PER_REPLICA[net] * NUM_STEPS[net] * way.num_replicas
    waits = [each.get("waited_s", 0.0) for each in measured]
    return Lap(
        images_per_s=num_images / seconds,
        seconds=seconds,
        cpu_s=sum(each["cpu_s"] for each in measured),
        peak_bytes=max(int(each["peak_bytes"]) for each in measured),
        waited_s=sum(waits) / len(waits),
        slowest_wait_s=min(waits),
        input_s=max(each.get("input_s", 0.0) for each in measured),
    )


@contextlib.contextmanager
def _started(
    way: Way, net: str, backend: str, folder: Path, reaper: OrphanReaper
) -> "Iterator[list[subprocess.Popen[bytes]]]":
    # Processes that never communicate train on the local batch alone.
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
        for process in processes:  # Do not wait for the end of a pass.
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
    """A process that ends with this one, even if this one is killed."""
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
    for rank, place in enumerate(places):
        # A single process with all cores keeps its framework's defaults.
        own = dict(place.env) if way.num_processes > 1 else {}
        own.pop(TUNABLES, None)  # unisono's tuning is part of what is measured.
        command = [sys.executable, "-m", _RACER, *words]
        process = _start(command, env | own | {"BENCH_RANK": str(rank)}, log, reaper)
        processes.append(process)
        # Before it has imported anything: threads inherit the cores.
        if place.cores:
            os.sched_setaffinity(process.pid, place.cores)


def _environment(way: Way, backend: str, folder: Path) -> dict[str, str]:
    env = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    env |= {"BENCH_STORE": str(folder / f"{way.name}.store"), "UNISONO_RUNS": ""}
    if way.kind == "distribution":
        count = f"--xla_force_host_platform_device_count={way.num_replicas}"
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {count}".strip()
    env.pop(SWITCH, None)
    if way.cpu_layers is not None:
        env[SWITCH] = way.cpu_layers
    # For peers on torch, whose gloo would listen at the address that the host's name leads to.
    env["GLOO_SOCKET_IFNAME"] = interface_of(LOOPBACK) or "lo"
    if way.kind in PEERS and PEERS[way.kind].backend in ("jax", "tensorflow"):
        ports = [free_port() for _ in range(way.num_processes)]
        env["BENCH_ADDRESSES"] = json.dumps([f"127.0.0.1:{port}" for port in ports])
    return env


def _collect(
    folder: Path, name: str, count: int, processes: "list[subprocess.Popen[bytes]]"
) -> list[str]:
    """What each process has written, once all have written."""
    files = [folder / f"{name}-{rank}" for rank in range(count)]
    while not all(file.exists() for file in files):
        ended = [process.returncode for process in processes if process.poll() is not None]
        if ended:
            log = folder / f"{'-'.join(name.split('-')[:2])}.log"
            last = last_line(log.read_text(errors="replace"))
            raise LaunchError(f"A process ended with code {ended[0]}: {last}")
        time.sleep(_POLL_S)
    return [file.read_text() for file in files]


def last_line(log: str) -> str:
    """The last line before the frames of a stack, with which XLA ends."""
    lines = [line for line in log.splitlines() if line.strip()]
    messages = [line for line in lines if not line.startswith((" ", "***"))]
    return (messages or lines or [""])[-1].strip()[:_MAX_LENGTH]


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        _kill(process)
        process.wait()


def _kill(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
