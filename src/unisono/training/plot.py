"""The plot of one training or of several: loss and accuracy, for train and test."""

from pathlib import Path
from typing import Any

from unisono.devices import format_replicas
from unisono.training import tables
from unisono.training.progress import clock

_COLOURS = ("#08519c", "#d94801", "#238b45", "#6a51a3")


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Write the plot; needs no screen."""
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
    """Those of one training; `place`: which one it is of several."""
    history = record["history"]
    epochs = [row["epoch"] for row in history]
    whose = f", {format_replicas(record['num_replicas'])}" if place is not None else ""
    for key, part, style in ((name, "train", "--"), (f"val_{name}", "test", "-")):
        if key not in history[0]:
            continue
        values = [row.get(key) for row in history]
        marker = "o" if len(epochs) == 1 else None
        axes.plot(epochs, values, style, color=colour, marker=marker, label=f"{part}{whose}")
    top = tables.best(record)
    key = f"val_{name}" if f"val_{name}" in top else name
    if top.get(key) is not None:
        is_right = top["epoch"] > len(history) / 2
        _mark(axes, top["epoch"], top[key], colour, is_right=is_right, line=place or 0)


def _mark(axes: Any, epoch: int, value: float, colour: str, *, is_right: bool, line: int) -> None:
    """A star, and beside it what it stands for, on the side where there is room.

    Best epochs of several trainings are often neighbours, so each has a line of its own.
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
