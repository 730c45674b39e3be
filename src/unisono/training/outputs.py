"""Where the results of a training go, tried before it begins.

A training of hours must not end with a folder that cannot be written to, and a disk that is full
at the end must not take the results of the rest with it.
"""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from unisono.checkpoint.atomic import replacing
from unisono.errors import OutputError


@dataclass(frozen=True)
class Outputs:
    """The files of one training."""

    folder: Path
    plot: Path

    @classmethod
    def at(cls, path: Path) -> "Outputs":
        """`plot.png` names the plot, beside which the rest is put; all else is a folder."""
        if path.suffix.lower() == ".png":
            return cls(path.parent, path)
        return cls(path, path / "plot.png")

    @property
    def table(self) -> Path:
        return self.folder / "history.csv"

    @property
    def record(self) -> Path:
        return self.folder / "history.json"

    @property
    def model(self) -> Path:
        return self.folder / "model.keras"

    def check(self) -> None:
        """Make the folder, and see that files can be written there."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as trial:
                trial.write(b"unisono")
            for path in (self.plot, self.table, self.record, self.model):
                if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
                    raise PermissionError(13, f"{path.name} is there and cannot be replaced")
        except OSError as error:
            raise OutputError(
                f"Asked for results in {self.folder}: {error.strerror or error}. Choose another "
                "place with --output."
            ) from error


def write(path: Path, fill: Callable[[Path], None]) -> None:
    """Write a file whole or not at all; OutputError where the disk is full or has gone."""
    advice = "The model is still in memory; make room, or choose another place with --output."
    with replacing(path, advice) as draft:
        fill(draft.path)
