"""What a step does on torch, for the table of docs/gpu.md: `python -m gpu.torch_rows --out FILE`.

In a real run over gloo, with the layers that GPUs have; see torch_steps.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from gpu.results import Row, write_rows

os.environ.setdefault("KERAS_BACKEND", "torch")

AT_MOST = {
    "host waits a step beyond plain Keras": 0,
    "kernels before backward, relative to plain Keras": 1.15,
    "collectives per batch norm, forward": 1,
    "collectives per batch norm, backward": 1,
    "first gradients in flight, as a fraction of backward": 1 / 3,
}


KNOWN_MISSES = {("lstm", "first gradients in flight, as a fraction of backward"): 0.6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    found = measured()
    rows = [
        Row(
            *("torch", net, metric, value),
            at_most=AT_MOST.get(metric),
            known_miss=KNOWN_MISSES.get((net, metric)),
        )
        for net, metric, value in found
        if value is not None
    ]
    write_rows(parser.parse_args().out, rows)


def measured() -> list[tuple[str, str, Any]]:
    from gpu.nets import NETS
    from gpu.torch_steps import run_nets

    steps = run_nets(*NETS)[0]
    return [(net, *row) for net, found in steps.items() for row in rows_of(found)]


def rows_of(steps: Any) -> list[tuple[str, Any]]:
    plain, ours = steps.plain, steps.parallel
    beyond = ours.waits - plain.waits
    # Those of gradients are the large ones: before, one after backward.
    buckets = ours.of_new_groups("backward")
    num_early = sum(c.num_bytes for c in buckets if c.phase == "backward")
    first = [ours.fraction_of_backward(c) for c in buckets[:1]]
    per_norm = [
        (
            f"collectives per batch norm, {phase}",
            _num(ours, phase) - (len(buckets) if phase == "backward" else 0),
        )
        for phase in ("forward", "backward")
    ]
    return [
        ("host waits a step beyond plain Keras", sum(beyond.values())),
        ("kernels before backward", ours.kernels["forward"]),
        ("kernels before backward, relative to plain Keras", _ratio(ours, plain, "forward")),
        ("kernels in backward, relative to plain Keras", _ratio(ours, plain, "backward")),
        *((name, _divided(n, steps.num_batch_norms)) for name, n in per_norm),
        ("gradient collectives in backward", len(buckets)),
        ("gradient bytes", steps.num_gradient_bytes),
        ("gradient bytes in flight during backward", min(num_early, steps.num_gradient_bytes)),
        ("first gradients in flight, as a fraction of backward", *(map(_rounded, first or [None]))),
        ("bytes of all collectives", sum(c.num_bytes for c in ours.collectives)),
    ]


def _ratio(ours: Any, plain: Any, phase: str) -> float:
    return round(ours.kernels[phase] / plain.kernels[phase], 3)


def _divided(count: int, num_norms: int) -> Any:
    return round(count / num_norms, 2) if num_norms else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _num(record: Any, phase: str) -> int:
    return sum(c.phase == phase for c in record.collectives)


if __name__ == "__main__":
    main()
