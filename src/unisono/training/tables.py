"""The results of a training as text: a line per epoch, a table at the end, two side by side."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unisono.devices import format_replicas
from unisono.training.progress import clock, speed

if TYPE_CHECKING:
    from unisono.training.run import Run

_NAMES = {"val_loss": "test loss", "val_accuracy": "test accuracy"}
_TIMES = ("epoch", "epoch_s", "train_s", "samples_per_s", "learning_rate")


def epoch_line(row: dict[str, Any], run: "Run") -> str:
    """One epoch, in one line."""
    values = [
        f"{_NAMES.get(name, name)} {value:.4f}" for name, value in row.items() if name not in _TIMES
    ]
    parts = [
        f"epoch {row['epoch']}/{run.num_epochs}",
        f"{row['epoch_s']:.1f} s",
        speed(row["samples_per_s"], run.num_replicas),
        *values,
    ]
    return "  ".join(parts)


def samples_per_s(record: dict[str, Any]) -> float:
    """Of an epoch in the middle; the first one includes compiling."""
    found = [float(row["samples_per_s"]) for row in record["history"]]
    return statistics.median(found[1:] or found)


def epoch_s(record: dict[str, Any]) -> float:
    found = [float(row["epoch_s"]) for row in record["history"]]
    return statistics.median(found[1:] or found)


def best(record: dict[str, Any]) -> dict[str, Any]:
    """The epoch with the highest test accuracy."""
    key = "val_accuracy" if "val_accuracy" in record["history"][0] else "accuracy"
    found: dict[str, Any] = max(record["history"], key=lambda row: row.get(key, 0.0))
    return found


def summary(record: dict[str, Any]) -> str:
    """The small table at the end of a training."""
    return _aligned([("", format_replicas(record["num_replicas"])), *_rows(record)])


def comparison(one: dict[str, Any], many: dict[str, Any]) -> str:
    """Two trainings side by side, with what the replicas gain."""
    head = ("", *(format_replicas(each["num_replicas"]) for each in (one, many)))
    both = [(a, left, right) for (a, left), (_, right) in zip(_rows(one), _rows(many), strict=True)]
    gain = samples_per_s(many) / samples_per_s(one)
    efficiency = gain * one["num_replicas"] / many["num_replicas"]
    rows = [head, *both, ("speed-up", "", f"{gain:.2f} x"), ("efficiency", "", f"{efficiency:.0%}")]
    notes = []
    if not any(device.get("kind") == "gpu" for device in many["devices"]):
        notes.append("Each CPU replica has cores of its own; the single one has as many as each.")
    return "\n".join([_aligned(rows), *notes])


def _rows(record: dict[str, Any]) -> list[tuple[str, str]]:
    last, top = record["history"][-1], best(record)
    key = "val_accuracy" if "val_accuracy" in last else "accuracy"
    rows = [
        ("epochs", f"{len(record['history'])}"),
        ("epoch time", f"{epoch_s(record):.2f} s"),
        ("total time", clock(record["total_s"])),
        ("samples/s", f"{samples_per_s(record):,.0f}"),
    ]
    if key in last:
        rows.append(("final test accuracy", f"{last[key]:.2%}"))
        rows.append(("best test accuracy", f"{top[key]:.2%} (epoch {top['epoch']})"))
    if record.get("checksum"):
        rows.append(("replicas hold the same model", f"yes ({record['checksum']})"))
    elif record["num_replicas"] == 1:
        rows.append(("replicas hold the same model", "-"))
    return rows


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = (
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
