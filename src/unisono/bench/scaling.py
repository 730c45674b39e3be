"""The step that JAX compiles for many replicas: what one machine can show of scaling.

    python -m unisono.bench.scaling [--net cifar10] [--replicas 1,8,32,128]

Each number of replicas has its own process with as many virtual devices, which trains one step.
The compiled program is the same for every device. Its size and its number of all-reduces must not
grow with the number of devices, nor the reduced bytes, except for batch norm, which gathers the
statistics of each replica.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unisono.bench.nets import PER_REPLICA, data, make
from unisono.devices import OVERSUBSCRIBE
from unisono.scratch import temporary_folder

_BYTES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "s32": 4, "u32": 4, "s64": 8, "pred": 1}
_ALL_REDUCE = re.compile(r"= (.+?) all-reduce\(")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_COMPILED = "*.cpu_after_optimizations.txt"


@dataclass(frozen=True)
class Program:
    """A compiled step."""

    num_replicas: int
    compile_s: float
    num_instructions: int
    num_all_reduces: int
    """All-reduce operations; one may reduce many arrays."""
    reduced_bytes: int
    """Per device."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--net", choices=sorted(PER_REPLICA), default="cifar10")
    parser.add_argument("--replicas", default="1,8,32,128", metavar="1,8,32,128")
    parser.add_argument("--rows", type=int, default=1, help="of each replica's batch")
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside is not None:
        _train_one_step(options.net, options.inside, options.rows)
        return
    print("| Replicas | Compile time | Instructions | All-reduces | Bytes reduced, per device |")
    print("|---|---|---|---|---|")
    for count in map(int, options.replicas.split(",")):
        found = measure(options.net, count, options.rows)
        print(
            f"| {found.num_replicas} | {found.compile_s:.1f} s | {found.num_instructions:,} | "
            f"{found.num_all_reduces} | {found.reduced_bytes:,} |",
            flush=True,
        )


def measure(net: str, num_replicas: int, rows: int = 1) -> Program:
    """Compile and run one step in a new process."""
    with temporary_folder("unisono-bench-") as folder:
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
        env = {**os.environ, "KERAS_BACKEND": "jax", "UNISONO_RUNS": "", OVERSUBSCRIBE: "1"}
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {flags}".strip()
        words = ["--net", net, "--rows", str(rows), "--inside", str(num_replicas)]
        command = [sys.executable, "-m", "unisono.bench.scaling", *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{num_replicas} replicas: {done.stderr[-2000:]}")
        # The step is by far the longest program.
        text = max((path.read_text() for path in folder.glob(_COMPILED)), key=len)
        return read_program(num_replicas, float(done.stdout.split()[-1]), text)


def read_program(num_replicas: int, compile_s: float, text: str) -> Program:
    """Count the instructions and all-reduces in the text of a program."""
    shapes = [found[1] for line in text.splitlines() if (found := _ALL_REDUCE.search(line))]
    return Program(
        num_replicas=num_replicas,
        compile_s=compile_s,
        num_instructions=sum(" = " in line for line in text.splitlines()),
        num_all_reduces=len(shapes),
        reduced_bytes=sum(map(_num_bytes, shapes)),
    )


def _num_bytes(shapes: str) -> int:
    total = 0
    for kind, dimensions in _SHAPE.findall(shapes):
        size = _BYTES[kind]
        for dimension in filter(None, dimensions.split(",")):
            size *= int(dimension)
        total += size
    return total


def _train_one_step(net: str, num_replicas: int, rows: int) -> None:
    import jax

    import unisono

    spent: dict[str, float] = {}

    def note(event: str, seconds: float, **about: Any) -> None:
        if event.endswith("backend_compile_duration"):
            spent[event] = max(seconds, spent.get(event, 0.0))

    jax.monitoring.register_event_duration_secs_listener(note)
    model = unisono.parallel(make(net), replicas=num_replicas)
    x, y = data(net, rows * num_replicas)
    model.fit(x, y, batch_size=len(x), verbose=0)
    print(max(spent.values()))  # The step takes longest.


if __name__ == "__main__":
    main()
