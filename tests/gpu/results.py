"""What the rehearsal found: one row for each backend, net and metric, and the table in Markdown.

A part of the rehearsal (JAX, TensorFlow, torch) gives its rows as JSON: a list of objects with the
fields of `Row`. Nothing here imports a framework.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

BEGIN = "<!-- gpu-rehearsal: begin -->"
END = "<!-- gpu-rehearsal: end -->"
TITLES = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "torch"}
BEFORE = Path(__file__).with_name("before.json")
"""Rows of the last commit before the step was optimized for GPUs, found by the same program."""


@dataclass(frozen=True)
class Row:
    """One number of one net; a target is an upper or a lower bound."""

    backend: str
    net: str
    metric: str
    value: float
    before: float | None = None
    """The same on the commit before."""
    peer: float | None = None
    """The same for the framework's own tool: `keras.distribution.DataParallel` on JAX."""
    at_most: float | None = None
    at_least: float | None = None
    known_miss: float | None = None
    """A value above `at_most` that is known and explained in docs/gpu.md; worse is a failure."""

    @property
    def is_met(self) -> bool:
        is_low = self.at_most is None or self.value <= self.at_most
        return is_low and (self.at_least is None or self.value >= self.at_least)

    @property
    def is_failure(self) -> bool:
        return not self.is_met and not (self.known_miss and self.value <= self.known_miss)

    @property
    def target(self) -> str:
        if self.at_most is not None:
            return f"≤ {shown(self.at_most)}"
        return "" if self.at_least is None else f"≥ {shown(self.at_least)}"


def read_rows(path: Path) -> list[Row]:
    return [Row(**found) for found in json.loads(path.read_text())]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    lines = [json.dumps({k: v for k, v in asdict(row).items() if v is not None}) for row in rows]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def with_before(rows: Sequence[Row], before: Sequence[Row]) -> list[Row]:
    """The rows with the values of the commit before, where they do not bring their own."""
    known = {(row.backend, row.net, row.metric): row.value for row in before}
    return [
        row
        if row.before is not None
        else replace(row, before=known.get((row.backend, row.net, row.metric)))
        for row in rows
    ]


def render(rows: Sequence[Row]) -> str:
    """One table for each backend."""
    parts = []
    for backend in dict.fromkeys(row.backend for row in rows):
        own = [row for row in rows if row.backend == backend]
        has_peer = any(row.peer is not None for row in own)
        columns = ["Net", "Metric", "Before", "Now", *["DataParallel"] * has_peer, "Target", "Met"]
        lines = [" | ".join(columns), "|".join(["---"] * len(columns))]
        last = None
        for row in own:
            peer = [shown(row.peer)] * has_peer
            met = "" if not row.target else "yes" if row.is_met else "**no**"
            net = "" if row.net == last else row.net
            cells = [net, row.metric, shown(row.before), shown(row.value), *peer, row.target, met]
            lines.append(" | ".join(cells))
            last = row.net
        table = "\n".join(f"| {line} |" for line in lines)
        parts.append(f"### {TITLES.get(backend, backend)}\n\n{table}\n")
    return "\n".join(parts)


def shown(value: float | None) -> str:
    """A number without digits that say nothing."""
    if value is None:
        return "—"
    return f"{value:,.0f}" if value == round(value) or value >= 100 else f"{value:.3g}"


def write_into(path: Path, text: str) -> None:
    """Replace what stands between the markers of a document."""
    document = path.read_text()
    head, _, rest = document.partition(BEGIN)
    _, found, tail = rest.partition(END)
    if not found:
        raise ValueError(f"{path} has no lines {BEGIN} and {END}.")
    path.write_text(f"{head}{BEGIN}\n{text}{END}{tail}")
