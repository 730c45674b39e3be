"""Compile the train steps of nets for A100s, and note what XLA made of them, one JSON line each.

    python -m gpu.jax_step unisono|plain|dataparallel NET... [--gpus 4] [--rows N] [--hlo FOLDER]

`unisono` goes through `unisono.parallel` and `fit`; `plain` is Keras on one GPU; `dataparallel`
is what `keras.distribution.DataParallel` compiles.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from gpu import compile_only_gpus, nets
from gpu.hlo import asynchronous_share, collectives, num_kernels, temporary_bytes

MIB = 2**20


def lowered_step(way: str, net: str, *, num_gpus: int, num_rows: int | None = None) -> Any:
    """A train step as `fit` would compile it; `num_rows` is the global batch."""
    model = nets.make(net)
    if way == "unisono":
        import unisono

        model = unisono.parallel(model, gpus=num_gpus)
    rows = num_rows or nets.PER_GPU[net] * num_gpus
    x, y = nets.data(net, rows)
    try:
        model.fit(x, y, batch_size=rows, verbose=0)
    except compile_only_gpus.Lowered as lowered:
        return lowered.step
    raise AssertionError("fit has called no compiled step on the GPUs")


def summary(program: Any) -> dict[str, float]:
    text = program.as_text()
    found = collectives(text)
    gathers = [each for each in found if each.kind != "all-reduce"]
    return {
        "collectives": len(found),
        "mib": sum(each.num_bytes for each in found) / MIB,
        "asynchronous": 100 * asynchronous_share(found),
        "overlapped": sum(each.num_overlapped for each in found),
        "gathers": len(gathers),
        "gathered_mib": sum(each.num_bytes for each in gathers) / MIB,
        "temporary_mib": temporary_bytes(program) / MIB,
        "kernels": num_kernels(text),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=("unisono", "plain", "dataparallel"))
    parser.add_argument("nets", nargs="+", choices=tuple(nets.PER_GPU))
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--hlo", type=Path)
    asked = parser.parse_args()
    compile_only_gpus.install(asked.gpus, is_plain=asked.way != "unisono")
    for net in asked.nets:
        began = time.monotonic()
        step = lowered_step(asked.way, net, num_gpus=asked.gpus, num_rows=asked.rows)
        program = step.compile()
        if asked.hlo:
            (asked.hlo / f"{asked.way}-{net}-{asked.rows or 0}.hlo").write_text(program.as_text())
        found = {"way": asked.way, "net": net, **summary(program)}
        print(json.dumps({**found, "seconds": round(time.monotonic() - began)}), flush=True)


if __name__ == "__main__":
    main()
