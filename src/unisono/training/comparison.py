"""`--compare`: the same program on one replica and on many, one after the other, side by side.

Both runs are given devices of the same kind: on CPUs the one replica has as many cores as each of
the many, as one GPU is compared with four of its kind.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from unisono.devices import Placement, format_replicas
from unisono.devices.cpu import num_cores
from unisono.errors import SettingError
from unisono.training import plot, tables
from unisono.training.outputs import write
from unisono.training.replicas import place
from unisono.training.settings import Settings, to_words


def compare(settings: Settings, program: Sequence[str]) -> int:
    """Run both and show them; the exit code."""
    placement = place(settings)
    if placement.num_replicas < 2:
        raise SettingError(
            "Asked to compare one replica with one. Say how many with --replicas 2, or --gpus 2."
        )
    one = dataclasses.replace(settings, replicas=1, gpus=None)
    if placement.kind == "gpu" or placement.is_simulated:
        one = dataclasses.replace(one, replicas=None, gpus=placement.indices[:1])
    records = []
    for each, cores in ((one, _share_of_cores(placement)), (settings, None)):
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
    table = tables.comparison(*records)
    print(f"\n{table}\n", flush=True)
    outputs = settings.outputs
    write(outputs.record, lambda path: _write_json(path, records))
    write(outputs.plot, lambda path: plot.draw(records, path))
    print(f"plot: {outputs.plot}")


def _write_json(path: Path, records: list[dict[str, Any]]) -> None:
    text = json.dumps({"runs": records}, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def _run(words: list[str], cores: set[int] | None) -> int:
    with _interrupts_left_to_the_program(), _pinned_to(cores):
        return subprocess.run([sys.executable, *words]).returncode


def _share_of_cores(placement: Placement) -> set[int] | None:
    """The cores of one CPU replica among many; None where they are not to be divided."""
    if placement.kind != "cpu" or not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    if num_cores() != len(cores) or len(cores) < placement.num_replicas:
        return None
    return set(cores[: len(cores) // placement.num_replicas])


@contextlib.contextmanager
def _pinned_to(cores: set[int] | None) -> Iterator[None]:
    """What is started inside runs on those cores."""
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
def _interrupts_left_to_the_program() -> Iterator[None]:
    """A Ctrl-C reaches the program too, which saves and ends; we end when it has."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
