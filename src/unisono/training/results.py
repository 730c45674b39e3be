"""The results of trainings: a line per epoch, a table, a plot, and `--compare`.

For `--compare` the same program runs on one replica and then on many, with devices of the same
kind: on CPUs the single replica has as many cores as each of the many.
"""

import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.devices import Placement, format_replicas
from unisono.devices.cpu import num_cores
from unisono.errors import ConfigurationError
from unisono.training.settings import Settings, to_words, write

if TYPE_CHECKING:
    from unisono.training.run import Run

_NAMES = {"val_loss": "test loss", "val_accuracy": "test accuracy"}
_TIMES = ("epoch", "epoch_s", "train_s", "samples_per_s", "learning_rate")


def epoch_line(row: dict[str, Any], run: "Run") -> str:
    """One epoch in one line."""
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
    """The median over epochs without the first, which includes compilation."""
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
    """The table at the end of a training."""
    return _aligned([("", format_replicas(record["num_replicas"])), *_rows(record)])


def comparison(one: dict[str, Any], many: dict[str, Any]) -> str:
    """Two trainings side by side, with speed-up and efficiency."""
    head = ("", *(format_replicas(each["num_replicas"]) for each in (one, many)))
    both = [(a, left, right) for (a, left), (_, right) in zip(_rows(one), _rows(many), strict=True)]
    gain = samples_per_s(many) / samples_per_s(one)
    efficiency = gain * one["num_replicas"] / many["num_replicas"]
    rows = [head, *both, ("speed-up", "", f"{gain:.2f} x"), ("efficiency", "", f"{efficiency:.0%}")]
    notes = []
    if not any(device.get("kind") == "gpu" for device in many["devices"]):
        notes.append("Each CPU replica has its own cores; the single one has as many as each.")
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


def speed(samples_per_s: float, num_replicas: int) -> str:
    each = f" ({samples_per_s / num_replicas:,.0f} per replica)" if num_replicas > 1 else ""
    return f"{samples_per_s:,.0f} samples/s{each}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> clock(75), clock(3675)
    ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


_COLOURS = ("#08519c", "#d94801", "#238b45", "#6a51a3")


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Write the plot, without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8))
    FigureCanvasAgg(figure)
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    loss_axes.set(xlabel="epoch", ylabel="loss", title="Loss")
    accuracy_axes.set(xlabel="epoch", ylabel="accuracy", title="Accuracy")
    for place, (record, colour) in enumerate(zip(records, _COLOURS, strict=False)):
        for axes, name in ((loss_axes, "loss"), (accuracy_axes, "accuracy")):
            _draw_lines(axes, record, name, colour, place if len(records) > 1 else None)
    for axes in (loss_axes, accuracy_axes):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.suptitle(_title(records))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _draw_lines(
    axes: Any, record: dict[str, Any], name: str, colour: str, place: int | None
) -> None:
    """The lines of one training; `place` is its index among several."""
    history = record["history"]
    epochs = [row["epoch"] for row in history]
    whose = f", {format_replicas(record['num_replicas'])}" if place is not None else ""
    for key, part, style in ((name, "train", "--"), (f"val_{name}", "test", "-")):
        if key not in history[0]:
            continue
        values = [row.get(key) for row in history]
        marker = "o" if len(epochs) == 1 else None
        axes.plot(epochs, values, style, color=colour, marker=marker, label=f"{part}{whose}")
    top = best(record)
    key = f"val_{name}" if f"val_{name}" in top else name
    if top.get(key) is not None:
        is_right = top["epoch"] > len(history) / 2
        _mark(axes, top["epoch"], top[key], colour, is_right=is_right, line=place or 0)


def _mark(axes: Any, epoch: int, value: float, colour: str, *, is_right: bool, line: int) -> None:
    """A star with its value beside it.

    The best epochs of several trainings are often close, so each label has its own height.
    """
    axes.plot([epoch], [value], "*", color=colour, markersize=13)
    side, offset = ("right", -10) if is_right else ("left", 10)
    up = 14 + 16 * line if axes.get_ylabel() == "loss" else -18 - 16 * line
    axes.annotate(
        f"epoch {epoch}: {value:.4g}",
        (epoch, value),
        (offset, up),
        textcoords="offset points",
        ha=side,
        color=colour,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1},
    )


def _title(records: list[dict[str, Any]]) -> str:
    parts = [
        f"{format_replicas(each['num_replicas'])} in {clock(each.get('total_s', 0.0))}"
        for each in records
    ]
    title = f"{records[0]['recipe']} ({records[0]['backend']}): {', '.join(parts)}"
    return title + "; the best epoch is marked"


def compare(settings: Settings, placement: Placement, program: Sequence[str]) -> int:
    """Run both and show the comparison; returns the exit code."""
    if placement.num_replicas < 2:
        raise ConfigurationError(
            "Asked to compare one replica with one. Give --replicas 2 or --gpus 2."
        )
    one = dataclasses.replace(settings, replicas=1, gpus=None)
    if placement.kind == "gpu" or placement.is_simulated:
        one = dataclasses.replace(one, replicas=None, gpus=placement.indices[:1])
    records = []
    for each, cores in ((one, _cores_of_one(placement)), (settings, None)):
        num_replicas = 1 if each is one else placement.num_replicas
        folder = settings.outputs.folder / format_replicas(num_replicas).replace(" ", "-")
        print(f"\n{format_replicas(num_replicas).capitalize()}:", flush=True)
        each = dataclasses.replace(each, is_compared=False, output=str(folder))
        if code := _run([*program, *to_words(each)], cores):
            return code
        records.append(json.loads((folder / "history.json").read_text("utf-8")))
    _show(settings, records)
    return 0


def _show(settings: Settings, records: list[dict[str, Any]]) -> None:
    table = comparison(*records)
    print(f"\n{table}\n", flush=True)
    outputs = settings.outputs
    write(outputs.record, lambda path: _write_json(path, records))
    write(outputs.plot, lambda path: draw(records, path))
    print(f"plot: {outputs.plot}")


def _write_json(path: Path, records: list[dict[str, Any]]) -> None:
    text = json.dumps({"runs": records}, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def _run(words: list[str], cores: set[int] | None) -> int:
    with _ignored_interrupts(), _pinned_to(cores):
        return subprocess.run([sys.executable, *words]).returncode


def _cores_of_one(placement: Placement) -> set[int] | None:
    """The cores of one CPU replica among many; None if cores are not divided."""
    if placement.kind != "cpu" or not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    if num_cores() != len(cores) or len(cores) < placement.num_replicas:
        return None
    return set(cores[: len(cores) // placement.num_replicas])


@contextlib.contextmanager
def _pinned_to(cores: set[int] | None) -> Iterator[None]:
    """Processes that are started inside run on these cores."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Ctrl-C also reaches the program, which saves and ends; wait for it."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
