"""What a user asks of a training: its options, read and checked before any framework is loaded.

A recipe gives the defaults, the command line changes them, and what makes no sense is refused at
once rather than after minutes.
"""

import argparse
import dataclasses
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import SettingError
from unisono.imports import keras_backend
from unisono.training.outputs import Outputs

BACKENDS = ("jax", "tensorflow", "torch")
SCALINGS = ("linear", "sqrt", "none")


@dataclass(frozen=True)
class Settings:
    """A training as it was asked for."""

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
        """The epochs that are trained: all of the schedule, or its first ones."""
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
    """The settings that a command line means, with the recipe's own where it says nothing."""
    parser = _parser(recipe, description, defaults, command)
    given = vars(parser.parse_args(arguments))
    choose_backend(given.pop("backend"))
    settings = Settings(recipe=recipe, **given)
    if settings.replicas is not None and settings.gpus is not None:
        raise SettingError("Asked for --replicas and for --gpus. Leave one of the two out.")
    return dataclasses.replace(settings, output=settings.output or f"{recipe}-results")


def choose_backend(name: str | None) -> None:
    """Have Keras use a backend: the one asked for, or its own choice if that is installed."""
    chosen = name or keras_backend()
    if "keras" in sys.modules and chosen != keras_backend():
        raise SettingError(
            f"Asked for the backend {chosen}; Keras was imported with {keras_backend()} before. "
            "Call unisono.training.begin before the first import of keras."
        )
    installed = [each for each in BACKENDS if importlib.util.find_spec(each) is not None]
    if chosen not in installed:
        if not installed:
            raise SettingError(
                "Found no backend of Keras. Install one: pip install jax, tensorflow or torch."
            )
        if name is not None or os.environ.get("KERAS_BACKEND"):
            raise SettingError(
                f"Asked for the backend {chosen}; installed are {', '.join(installed)}. Choose "
                f"among those (--backend {installed[0]}), or install {chosen}."
            )
        chosen = installed[0]  # Nobody has chosen; Keras' own default is just not there.
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
        "--replicas", type=_count, metavar="N", help="on GPUs or CPUs (default: every GPU, or one)"
    )
    group.add_argument("--backend", choices=BACKENDS, help="of Keras (default: its own choice)")
    group.add_argument(
        "--mixed-precision", dest="is_mixed_precision", action="store_true", help="16-bit numbers"
    )
    group.add_argument(
        "--compare",
        dest="is_compared",
        action="store_true",
        help="train on one replica first, and compare the two",
    )


def _add_training(group: Any, defaults: Mapping[str, Any]) -> None:
    def add(name: str, kind: Any, text: str, **more: Any) -> None:
        key = more.pop("dest", name.replace("-", "_"))
        default = defaults.get(key, Settings.__dataclass_fields__[key].default)
        shown = "" if default is None else f" (default: {default})"
        group.add_argument(
            f"--{name}", dest=key, type=kind, default=default, help=text + shown, **more
        )

    add("epochs", _count, "of the whole schedule", metavar="N")
    add("stop-after", _count, "epochs, the schedule being that of all", metavar="N")
    add("batch-per-replica", _count, "samples of each replica at a step", metavar="N")
    add("lr", _rate, "learning rate of one replica", dest="learning_rate", metavar="RATE")
    add("lr-scaling", str, "of the learning rate with the replicas", choices=SCALINGS)
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
        help=f"a folder, or a .png beside which the rest is put (default: {recipe}-results)",
    )


def _checked(convert: Callable[[str], Any], is_good: Callable[[Any], bool], what: str) -> Any:
    def parse(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not is_good(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse


def _gpu_ids(text: str) -> int | tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part) if "," in text else int(text)


_count = _checked(int, lambda value: value >= 1, "a whole number of at least 1")
_index = _checked(int, lambda value: value >= 0, "a whole number from 0")
_rate = _checked(float, lambda value: 0 < value < math.inf, "a number above 0")
_gpus = _checked(_gpu_ids, lambda value: True, "a number of GPUs, or ids such as 0,2")


def to_words(settings: Settings) -> list[str]:
    """The settings as a command line, for the same program started anew."""
    words = []
    for name, key in _OPTIONS.items():
        value = getattr(settings, key)
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            is_ids = isinstance(value, tuple)
            # A comma tells ids from a count, also for one id.
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
