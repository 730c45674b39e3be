"""Print what a step does on torch, for the table of docs/gpu.md.

    PYTHONPATH=src:tests/gpu python tests/gpu/rehearse_torch.py --output rows.json

Each row is {"backend", "net", "metric", "value", "before"}; "before" is the value in the rows of
torch_before.json, which are those of commit 0816c19, or in those that `--before` names.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--before", type=Path, default=Path(__file__).with_name("torch_before.json")
    )
    options = parser.parse_args()
    rows = json.loads(options.before.read_text())
    before = {(row["net"], row["metric"]): row["value"] for row in rows}
    rows = [
        {"backend": "torch", "net": net, "metric": metric, "value": value}
        | {"before": before.get((net, metric))}
        for net, metric, value in measured()
    ]
    options.output.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print(f"{row['net']:15}{row['metric']:55}{row['before']!s:>12}{row['value']!s:>12}")


def measured() -> list[tuple[str, str, Any]]:
    from nets import NETS
    from torch_steps import run_nets

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
