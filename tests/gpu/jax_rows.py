"""The rows of JAX: what XLA makes of the train steps of four nets on four A100s.

python -m gpu.jax_rows --out rows.json [--nets lstm,transformer]
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu.nets import NETS
from gpu.results import Row, write_rows

GPUS = 4
UNDIVIDED = ("lstm", 4 * 64 + 2)
"""A net, and a global batch that does not divide by the GPUs."""
KNOWN_MEMORY = {"minigooglenet": 1.11, "resnet50": 1.07, "transformer": 1.08}
"""Of one GPU: the scheduler that overlaps collectives keeps an activation or two for longer."""
# How fast the kernels are does not matter, since none runs.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def compiled(way: str, nets: Sequence[str], **options: int) -> dict[str, dict[str, Any]]:
    """What a process found, by net."""
    words = [sys.executable, "-m", "gpu.jax_step", way, *nets]
    words += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    flags = " ".join([os.environ.get("XLA_FLAGS", ""), QUICK])
    done = subprocess.run(
        words, env={**os.environ, "XLA_FLAGS": flags}, stdout=subprocess.PIPE, text=True, check=True
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {each["net"]: each for each in found}


def rows_of(nets: Sequence[str]) -> list[Row]:
    ours = compiled("unisono", nets, gpus=GPUS)
    peers = compiled("dataparallel", nets, gpus=GPUS)
    plain = compiled("plain", nets, gpus=1)
    rows = []
    for net in nets:
        rows += _rows(net, ours[net], peers[net], plain[net])
    if UNDIVIDED[0] in nets:
        net, num_rows = UNDIVIDED
        found = compiled("unisono", [net], gpus=GPUS, rows=num_rows)[net]
        name, metric = f"{net}, {num_rows} rows", "collectives that make replicas agree"
        rows.append(Row("jax", name, metric, found["collectives"], at_least=1))
    return rows


def _rows(net: str, own: Any, peer: Any, plain: Any) -> list[Row]:
    def row(metric: str, key: str, per: float = 1.0, **target: float) -> Row:
        return Row("jax", net, metric, own[key] / per, peer=peer[key] / per, **target)

    memory, kernels = plain["temporary_mib"], plain["kernels"]
    miss = {"known_miss": KNOWN_MEMORY[net]} if net in KNOWN_MEMORY else {}
    return [
        row("collectives", "collectives"),
        row("MiB in collectives", "mib"),
        row("% of them asynchronous", "asynchronous", at_least=90),
        row("kernels that run meanwhile", "overlapped"),
        row("all-gathers of activations", "gathers", at_most=0),
        row("MiB gathered", "gathered_mib", at_most=0),
        row("temporary MiB per GPU", "temporary_mib"),
        row("… × one GPU with plain Keras", "temporary_mib", memory, at_most=1.05, **miss),
        row("kernels × one GPU with plain Keras", "kernels", kernels),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--nets", default=",".join(NETS))
    asked = parser.parse_args()
    write_rows(asked.out, rows_of(asked.nets.split(",")))


if __name__ == "__main__":
    main()
