"""One measured cell of the exactness table, as it is kept in a file: a case, backend, replicas."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cell:
    """What one comparison found: exactly one of deviation, skipped and error is set.

    `position` is the case's place in the table.
    """

    backend: str
    replicas: int
    case: str
    position: int
    group: str
    title: str
    tolerance: float
    processes: int = 1
    """Of the run; 1 where one program drives all replicas."""
    deviation: float | None = None
    where: str = ""
    skipped: str | None = None
    error: str | None = None

    @property
    def key(self) -> tuple[str, int, int, str]:
        return self.backend, self.processes, self.replicas, self.case

    @property
    def failed(self) -> bool:
        """Whether it is an error or beyond its tolerance; a NaN is beyond any."""
        if self.skipped is not None:
            return False
        return self.deviation is None or not self.deviation <= self.tolerance

    def to_line(self) -> str:
        return json.dumps(asdict(self))


def read_cells(path: Path) -> list[Cell]:
    """The cells in a file of JSON lines; a last line that is cut short is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [Cell(**json.loads(line)) for line in lines if line]


def write_cells(path: Path, cells: Iterable[Cell]) -> None:
    path.write_text("".join(cell.to_line() + "\n" for cell in cells))
