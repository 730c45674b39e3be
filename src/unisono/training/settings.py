"""The options of a training and its output files, checked before any framework is loaded.

A recipe gives the defaults and the command line overrides them. Wrong options and folders that
cannot be written to are errors at once, not after minutes or at the end of a long training.
"""

import argparse
import dataclasses
import importlib.util
import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.checkpoint.atomic import replacing
from unisono.errors import ConfigurationError, OutputError
from unisono.imports import keras_backend
from unisono.launch.request import checked_option

BACKENDS = ("jax", "tensorflow", "torch")
SCALINGS = ("linear", "sqrt", "none")


@dataclass(frozen=True)
class Outputs:
    """The output files of a training."""

    folder: Path
    plot: Path

    @classmethod
    def at(cls, path: Path) -> "Outputs":
        """`x.png` names the plot, beside which the other files go; any other path is a folder."""
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
        """Make the folder, and check that files can be written there."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as trial:
                trial.write(b"unisono")
            for path in (self.plot, self.table, self.record, self.model):
                if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
                    raise PermissionError(13, f"{path.name} exists and cannot be replaced")
        except OSError as error:
            raise OutputError(
                f"Asked for results in {self.folder}: {error.strerror or error}. Choose another "
                "folder with --output."
            ) from error


def write(path: Path, fill: Callable[[Path], None]) -> None:
    """Write a file atomically; raises OutputError if the disk is full or gone."""
    advice = "The model is still in memory; free disk space, or choose another --output."
    with replacing(path, advice) as draft:
        fill(draft.path)


@dataclass(frozen=True)
class Settings:
    """The options of a training."""

    recipe: str
    epochs: int
    batch_per_replica: int
    learning_rate: float
    lr_scaling: str = "linear"
    warmup_epochs: int = 0
    stop_after: int | None = None
    replicas: int | None = None
    gpus: int | tuple[int, ...] | None = None
    data: str | None = None
    seed: int = 0
    is_mixed_precision: bool = False
    is_compared: bool = False
    output: str = ""

    @property
    def num_epochs(self) -> int:
        """The number of epochs to train: all of the schedule, or its first ones."""
        return min(self.epochs, self.stop_after or self.epochs)

    @property
    def outputs(self) -> Outputs:
        return Outputs.at(Path(self.output))


def read(
    recipe: str,
    description: str,
    defaults: Mapping[str, Any],
    arguments: Sequence[str] | None,
    *,
    command: str | None = None,
) -> Settings:
    """The settings of a command line, with the recipe's defaults."""
    parser = _parser(recipe, description, defaults, command)
    given = vars(parser.parse_args(arguments))
    choose_backend(given.pop("backend"))
    settings = Settings(recipe=recipe, **given)
    if settings.replicas is not None and settings.gpus is not None:
        raise ConfigurationError("Asked for --replicas and for --gpus. Leave one of the two out.")
    return dataclasses.replace(settings, output=settings.output or f"{recipe}-results")


def choose_backend(name: str | None) -> None:
    """Set Keras' backend: the requested one, or Keras' default if it is installed."""
    chosen = name or keras_backend()
    if "keras" in sys.modules and chosen != keras_backend():
        raise ConfigurationError(
            f"Asked for the backend {chosen}; Keras was already imported with {keras_backend()}. "
            "Call unisono.training.begin before the first import of keras."
        )
    installed = [each for each in BACKENDS if importlib.util.find_spec(each) is not None]
    if chosen not in installed:
        if not installed:
            raise ConfigurationError(
                "Found no backend of Keras. Install one: pip install jax, tensorflow or torch."
            )
        if name is not None or os.environ.get("KERAS_BACKEND"):
            raise ConfigurationError(
                f"Asked for the backend {chosen}; installed are {', '.join(installed)}. Choose "
                f"among those (--backend {installed[0]}), or install {chosen}."
            )
        chosen = installed[0]  # Keras' default is not installed, and the user did not choose it.
    os.environ["KERAS_BACKEND"] = chosen


def _parser(
    recipe: str, description: str, defaults: Mapping[str, Any], command: str | None
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_devices(parser.add_argument_group("devices"))
    _add_training(parser.add_argument_group("training"), defaults)
    _add_files(parser.add_argument_group("data and results"), recipe)
    return parser


def _add_devices(group: Any) -> None:
    group.add_argument(
        "-g", "--gpus", type=_gpus, metavar="N", help="how many GPUs, or their ids: 0,2"
    )
    group.add_argument(
        "--replicas",
        type=_count,
        metavar="N",
        help="on GPUs or CPUs (default: all GPUs, or one)",
    )
    group.add_argument("--backend", choices=BACKENDS, help="of Keras (default: as configured)")
    group.add_argument(
        "--mixed-precision", dest="is_mixed_precision", action="store_true", help="16-bit numbers"
    )
    group.add_argument(
        "--compare",
        dest="is_compared",
        action="store_true",
        help="also train on one replica, and compare",
    )


def _add_training(group: Any, defaults: Mapping[str, Any]) -> None:
    def add(name: str, kind: Any, text: str, **more: Any) -> None:
        key = more.pop("dest", name.replace("-", "_"))
        default = defaults.get(key, Settings.__dataclass_fields__[key].default)
        shown = "" if default is None else f" (default: {default})"
        group.add_argument(
            f"--{name}", dest=key, type=kind, default=default, help=text + shown, **more
        )

    add("epochs", _count, "of the full schedule", metavar="N")
    add("stop-after", _count, "stop early, with the schedule of all epochs", metavar="N")
    add("batch-per-replica", _count, "batch size per replica", metavar="N")
    add("lr", _rate, "learning rate for one replica", dest="learning_rate", metavar="RATE")
    add("lr-scaling", str, "of the learning rate with the number of replicas", choices=SCALINGS)
    add("warmup-epochs", _index, "until the scaled learning rate is reached", metavar="N")
    add("seed", _index, "of weights, order, dropout and augmentation", metavar="N")


def _add_files(group: Any, recipe: str) -> None:
    group.add_argument(
        "--data", metavar="PATH", help="an .npz, a folder of class folders, or synthetic"
    )
    group.add_argument(
        "-o",
        "--output",
        default="",
        metavar="PATH",
        help=f"a folder, or a .png in it (default: {recipe}-results)",
    )


def _gpu_ids(text: str) -> int | tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part) if "," in text else int(text)


_count = checked_option(int, lambda value: value >= 1, "a whole number of at least 1")
_index = checked_option(int, lambda value: value >= 0, "a whole number from 0")
_rate = checked_option(float, lambda value: 0 < value < math.inf, "a number above 0")
_gpus = checked_option(_gpu_ids, lambda value: True, "a number of GPUs, or ids such as 0,2")


def to_words(settings: Settings) -> list[str]:
    """The settings as a command line, to start the same program again."""
    words = []
    for name, key in _OPTIONS.items():
        value = getattr(settings, key)
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            is_ids = isinstance(value, tuple)
            # The comma distinguishes one id from a count.
            words += [name, "".join(f"{i}," for i in value) if is_ids else str(value)]
    return words


_OPTIONS = {
    "--gpus": "gpus",
    "--replicas": "replicas",
    "--mixed-precision": "is_mixed_precision",
    "--compare": "is_compared",
    "--epochs": "epochs",
    "--stop-after": "stop_after",
    "--batch-per-replica": "batch_per_replica",
    "--lr": "learning_rate",
    "--lr-scaling": "lr_scaling",
    "--warmup-epochs": "warmup_epochs",
    "--seed": "seed",
    "--data": "data",
    "--output": "output",
}
