"""The exactness table in Markdown, from measured cells."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from exactness.cell import Cell

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
