"""Deviations between two runs of a case, the measured cells, and the table in Markdown.

Nothing here imports Keras.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Deviation:
    """How far two runs differ: `value` is relative to max(1, |expected|)."""

    value: float
    where: str


def largest_deviation(expected: Any, actual: Any) -> Deviation:
    """Compare nested results; a missing key, another shape or a NaN in one of them is infinite."""
    wanted, found = dict(flatten(expected)), dict(flatten(actual))
    if wanted.keys() != found.keys():
        return Deviation(np.inf, f"only one run has {sorted(wanted.keys() ^ found.keys())}")
    each = (Deviation(distance(wanted[key], found[key]), key) for key in wanted)
    return max(each, key=lambda deviation: deviation.value, default=Deviation(0.0, "nothing"))


def flatten(results: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for every leaf of nested dicts, lists and tuples."""
    if isinstance(results, Mapping):
        for key in results:
            yield from flatten(results[key], f"{path}/{key}" if path else str(key))
    elif isinstance(results, (list, tuple)):
        for index, value in enumerate(results):
            yield from flatten(value, f"{path}[{index}]")
    else:
        yield path, results


def distance(expected: Any, actual: Any) -> float:
    """The largest deviation of two leaves, elements that are NaN in both counting as equal."""
    if not is_number(expected) or not is_number(actual):
        return 0.0 if type(expected) is type(actual) and expected == actual else np.inf
    a = np.asarray(expected, dtype=np.float64)
    b = np.asarray(actual, dtype=np.float64)
    if a.shape != b.shape:
        return np.inf
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(a - b) / np.maximum(1.0, np.abs(a))
    apart = np.where(np.isnan(apart), np.inf, apart)
    return float(np.max(np.where(same, 0.0, apart), initial=0.0))


def is_number(leaf: Any) -> bool:
    return isinstance(leaf, (bool, int, float, np.ndarray, np.generic))


@dataclass(frozen=True)
class Cell:
    """The result of one comparison: exactly one of deviation, skipped and error is set.

    `position` is the case's row in the table.
    """

    backend: str
    replicas: int
    case: str
    position: int
    group: str
    title: str
    tolerance: float
    processes: int = 1
    """The processes of the run; 1 if one process drives all replicas."""
    deviation: float | None = None
    where: str = ""
    skipped: str | None = None
    error: str | None = None

    @property
    def key(self) -> tuple[str, int, int, str]:
        return self.backend, self.processes, self.replicas, self.case

    @property
    def failed(self) -> bool:
        """Whether it is an error or beyond its tolerance, as a NaN is."""
        if self.skipped is not None:
            return False
        return self.deviation is None or not self.deviation <= self.tolerance

    def to_line(self) -> str:
        return json.dumps(asdict(self))


def read_cells(path: Path) -> list[Cell]:
    """The cells in a file of JSON lines; a truncated last line is ignored."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [Cell(**json.loads(line)) for line in lines if line]


def write_cells(path: Path, cells: Iterable[Cell]) -> None:
    path.write_text("".join(cell.to_line() + "\n" for cell in cells))


Column = tuple[str, int, int]
"""Backend, processes, replicas."""

MARKER = "<!-- exactness-table -->"
BACKENDS = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "torch"}


def render(cells: Sequence[Cell]) -> str:
    """Sections of rows (feature) by columns (backend and replicas), then notes."""
    columns = columns_of(cells)
    found = {cell.key: cell for cell in cells}
    rows = {cell.case: cell for cell in cells}
    parts = [summary(cells, columns)]
    for group in dict.fromkeys(cell.group for cell in cells):
        lines = header(group, columns)
        for name, row in rows.items():
            if row.group == group:
                entries = (entry(found.get((*column, name))) for column in columns)
                lines.append(f"| {row.title} | " + " | ".join(entries) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, *notes(cells)]) + "\n"


def columns_of(cells: Iterable[Cell]) -> list[Column]:
    order = list(BACKENDS)
    present = {(cell.backend, cell.processes, cell.replicas) for cell in cells}
    return sorted(present, key=lambda column: (order.index(column[0]), *column[1:]))


def column_name(backend: str, processes: int, replicas: int) -> str:
    name = f"{BACKENDS[backend]} {replicas}"
    return name if processes == 1 else f"{name} processes"


def header(title: str, columns: Sequence[Column]) -> list[str]:
    names = (column_name(*column) for column in columns)
    return [f"| {title} | " + " | ".join(names) + " |", "|---|" + "---|" * len(columns)]


def summary(cells: Sequence[Cell], columns: Sequence[Column]) -> str:
    """The largest deviation of each column, one line for each tolerance."""
    lines = header("Largest deviation", columns)
    for tolerance in sorted({cell.tolerance for cell in cells if cell.deviation is not None}):
        worst = (largest(cells, tolerance, *column) for column in columns)
        entries = ("" if value is None else number(value) for value in worst)
        title = f"cases held to {number(tolerance)}"
        lines.append(f"| {title} | " + " | ".join(entries) + " |")
    return "\n".join(lines)


def largest(cells: Sequence[Cell], tolerance: float, *column: Any) -> float | None:
    alike = (
        c
        for c in cells
        if (c.tolerance, c.backend, c.processes, c.replicas) == (tolerance, *column)
    )
    return max((c.deviation for c in alike if c.deviation is not None), default=None)


def entry(cell: Cell | None) -> str:
    """A cell's text: a number, bold beyond its tolerance; a dash; an error; or nothing yet."""
    if cell is None:
        return ""
    if cell.skipped is not None:
        return "—"
    if cell.deviation is None:
        return "**error**"
    return f"**{number(cell.deviation)}**" if cell.failed else number(cell.deviation)


def number(value: float) -> str:
    """One digit and a short exponent: 3e-8."""
    if value == 0 or value != value or value in (float("inf"), float("-inf")):
        return f"{value:g}"
    digit, exponent = f"{value:.0e}".split("e")
    return f"{digit}e{int(exponent)}"


def notes(cells: Sequence[Cell]) -> list[str]:
    """Why cells are empty, and what failed."""
    dashes: dict[tuple[str, str, str], None] = {}
    for cell in cells:
        if cell.skipped is not None:
            dashes[(cell.title, BACKENDS[cell.backend], cell.skipped)] = None
    failures = [cell for cell in cells if cell.failed]
    parts = []
    if dashes:
        lines = [f"- {title} on {backend}: {why}." for title, backend, why in dashes]
        parts.append("No number (—):\n\n" + "\n".join(lines))
    if failures:
        parts.append("Failed:\n\n" + "\n".join(f"- {explain(cell)}" for cell in failures))
    return parts


def explain(cell: Cell) -> str:
    place = f"{cell.case} ({BACKENDS[cell.backend]}, {cell.replicas} replicas)"
    if cell.error is not None:
        return f"{place}: {cell.error.splitlines()[0] if cell.error else 'error'}"
    return f"{place}: {cell.deviation:.1e} beyond {cell.tolerance:.0e} at {cell.where}"


def write_into(path: Path, table: str) -> None:
    """Replace what stands between the two markers of a document."""
    parts = path.read_text().split(MARKER)
    if len(parts) != 3:
        raise ValueError(
            f"Asked to write the table into {path}; it has {len(parts) - 1} lines "
            f"'{MARKER}'. Put two of them where the table belongs."
        )
    path.write_text(f"{parts[0]}{MARKER}\n\n{table}\n{MARKER}{parts[2]}")
