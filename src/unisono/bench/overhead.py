"""What `parallel` costs and gains on a net bound by overhead, in interleaved rounds.

    python -m unisono.bench.overhead [--backend jax,tensorflow,torch] [--rounds 7]

Each way of training (plain Keras; one replica; two replicas; the backend's own way with two) has a
process of its own, warmed up once. In every round each of them trains one pass while the others
wait, and ratios are taken within a round: machines drift, rounds do not.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence

from unisono.bench.mnist_cnn import WAYS

_OURS = ("one", "two")
_RATIOS = (("one", "plain"), ("two", "own"), ("two", "plain"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", default="jax,tensorflow,torch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--global-batch", type=int, default=512)
    parser.add_argument("--num-batches", type=int, default=20)
    parser.add_argument("--ways", default=",".join(WAYS))
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    print(f"load before the start: {load:.2f} on {os.cpu_count()} cores")
    for backend in options.backend.split(","):
        rates = measure(
            backend,
            options.ways.split(","),
            rounds=options.rounds,
            sizes=(options.global_batch, options.num_batches),
        )
        print(f"\n{backend}: images per second, median of {options.rounds} rounds")
        for way, values in rates.items():
            spread = (max(values) - min(values)) / statistics.median(values)
            print(f"  {way:6s} {statistics.median(values):9.0f}   spread {spread:.0%}")
        for above, below in _RATIOS:
            if above in rates and below in rates:
                pairs = zip(rates[above], rates[below], strict=True)
                ratio = statistics.median(a / b for a, b in pairs)
                print(f"  {above} / {below}: {ratio:.3f}")


def measure(
    backend: str, ways: Sequence[str], *, rounds: int, sizes: tuple[int, int]
) -> dict[str, list[float]]:
    """Images per second of each way in each round."""
    processes = {}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    try:
        for way in ways:
            processes[way] = _start(backend, way, sizes)
        for _ in range(rounds):
            for way, process in processes.items():
                assert process.stdin is not None
                print("go", file=process.stdin, flush=True)
                rates[way].append(float(_answer(process)))
    finally:
        for process in processes.values():
            _end(process)
    return rates


def _start(backend: str, way: str, sizes: tuple[int, int]) -> "subprocess.Popen[str]":
    env = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = subprocess.Popen(
        [sys.executable, "-m", "unisono.bench.mnist_cnn", way, *map(str, sizes)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    # One after the other: a warm-up beside another one's would share its cores.
    while _answer(process) != "ready":
        pass
    return process


def _end(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _answer(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"A benchmark process ended with code {process.wait()}.")
    return line.strip()


if __name__ == "__main__":
    main()
