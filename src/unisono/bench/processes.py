"""How close processes that train together come to processes that never talk.

    python -m unisono.bench.processes [--backend jax] [--model mnist_cnn] [--rounds 5]

Both ways have two processes, pinned alike and warmed up once. In every round each way trains one
pass while the other waits, and ratios are taken within a round.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from unisono.bench.passes import PER_REPLICA
from unisono.devices import Policy
from unisono.launch.plan import seats

_NUM_STEPS = {"mnist_cnn": 40, "minigooglenet": 6}
_WAYS = ("together", "apart")
_POLL_S = 0.02
_PASSES = "unisono.bench.passes"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", default="jax,tensorflow,torch")
    parser.add_argument("--model", default=",".join(PER_REPLICA))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args(arguments)
    print(f"load before the start: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    for model in asked.model.split(","):
        for backend in asked.backend.split(","):
            rates = measure(backend, model, rounds=asked.rounds, num_processes=asked.processes)
            ratios = [a / b for a, b in zip(rates["together"], rates["apart"], strict=True)]
            figures = ", ".join(f"{way} {statistics.median(rates[way]):.0f}" for way in _WAYS)
            print(
                f"{model}, {backend}: {figures} images/s; together / apart "
                f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
                flush=True,
            )


def measure(backend: str, model: str, *, rounds: int, num_processes: int) -> dict[str, list[float]]:
    """Images per second of all processes of each way, in each round."""
    rates: dict[str, list[float]] = {way: [] for way in _WAYS}
    started: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as name:
        folder = Path(name)
        words = [model, str(_NUM_STEPS[model])]
        env = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
        try:
            # One after the other: a warm-up beside another one's would share its cores.
            started += _together([str(folder), "together", *words], num_processes, env)
            _collect(folder, "together-ready", num_processes, started)
            started += _apart([str(folder), "apart", *words], num_processes, env)
            _collect(folder, "apart-ready", num_processes, started)
            for number in range(rounds):
                for way in _WAYS:
                    (folder / f"{way}-{number}").touch()
                    found = _collect(folder, f"{way}-{number}", num_processes, started)
                    rates[way].append(sum(map(float, found)))
        finally:
            (folder / "end").touch()
            for process in started:
                _end(process)
    return rates


def _together(
    words: list[str], num_processes: int, env: dict[str, str]
) -> "list[subprocess.Popen[bytes]]":
    launcher = [sys.executable, "-m", "unisono", "run", "--replicas", str(num_processes)]
    return [subprocess.Popen([*launcher, "-m", _PASSES, *words], env=env)]


def _apart(
    words: list[str], num_processes: int, env: dict[str, str]
) -> "list[subprocess.Popen[bytes]]":
    cores = sorted(os.sched_getaffinity(0))
    places = seats(
        num_processes,
        gpus=None,
        cores=cores,
        num_cores=len(cores),
        policy=Policy(),
        given=os.environ,
    )
    processes = []
    for rank, seat in enumerate(places):
        process = subprocess.Popen(
            [sys.executable, "-m", _PASSES, *words],
            env=env | seat.env | {"BENCH_RANK": str(rank)},
        )
        # Before it has imported anything: threads inherit the cores of who starts them.
        if seat.cores:
            os.sched_setaffinity(process.pid, seat.cores)
        processes.append(process)
    return processes


def _collect(
    folder: Path, name: str, count: int, processes: "list[subprocess.Popen[bytes]]"
) -> list[str]:
    """What each process has written, once all have."""
    files = [folder / f"{name}-{rank}" for rank in range(count)]
    while not all(file.exists() for file in files):
        ended = [process.returncode for process in processes if process.poll() is not None]
        if ended:
            raise RuntimeError(f"A benchmark process ended with code {ended[0]}.")
        time.sleep(_POLL_S)
    return [file.read_text() for file in files]


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
