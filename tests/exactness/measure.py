"""Runs cases of the exactness contract on the Keras backend of this process.

`python -m exactness.measure --out cells.jsonl --replicas 2,3 --cases "adam*,masked_gru"`. Cells
that the file holds already are not measured again, and the one at work is named in a file beside
it, so that whoever started this process can go on after a crash. In a run of several processes each
measures the same cells and the chief writes; an error ends the run, as the processes may differ
from then on.
"""

import argparse
import functools
import os
import traceback
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import keras

import unisono
from exactness.case import Case, Results, run_case
from exactness.cases import CASES
from exactness.results import Cell, largest_deviation, read_cells
from unisono.launch.client import current_world


def cases_like(patterns: str) -> list[Case]:
    """The cases whose name, or whose group's title, matches one of the patterns."""
    wanted = patterns.split(",")
    return [
        case
        for case in CASES
        if any(fnmatchcase(name, pattern) for name in (case.name, case.group) for pattern in wanted)
    ]


def measure(cells: list[tuple[Case, int]], note: Path) -> Iterator[Cell]:
    """Compare each case and number of replicas with plain Keras on one device."""
    reference: dict[str, Results] = {}
    for case, replicas in cells:
        note.write_text(to_cell(case, replicas).to_line())
        reason = case.reason_to_skip(keras.backend.backend())
        if reason is not None:
            yield to_cell(case, replicas, skipped=reason)
            continue
        try:
            if case.name not in reference:
                reference = {case.name: run_case(case, as_it_is)}
            adopt = functools.partial(unisono.parallel, replicas=replicas)
            found = largest_deviation(reference[case.name], run_case(case, adopt))
        except Exception as exc:
            traceback.print_exc()
            failed = to_cell(case, replicas, error=f"{type(exc).__name__}: {exc}")
            if current_world() is not None:
                note.write_text(failed.to_line())
                raise SystemExit(1) from exc
            yield failed
        else:
            yield to_cell(case, replicas, deviation=found.value, where=found.where)


def as_it_is(model: Any) -> Any:
    return model


def to_cell(case: Case, replicas: int, **found: Any) -> Cell:
    return Cell(
        backend=keras.backend.backend(),
        replicas=replicas,
        case=case.name,
        position=CASES.index(case),
        group=case.group,
        title=case.title,
        tolerance=case.tolerance,
        processes=unisono.topology().world_size,
        **found,
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--replicas", required=True)
    parser.add_argument("--cases", default="*")
    asked = parser.parse_args(arguments)
    counts = [int(count) for count in asked.replicas.split(",")]
    done = {found.key for found in read_cells(asked.out)}
    num_processes = unisono.topology().world_size
    cells = [
        (case, replicas)
        for case in cases_like(asked.cases)
        for replicas in counts
        if (keras.backend.backend(), num_processes, replicas, case.name) not in done
    ]
    if not unisono.topology().is_chief:
        asked.out = Path(os.devnull)
    note = asked.out if asked.out.is_char_device() else asked.out.with_suffix(".now")
    with asked.out.open("a") as out:
        for found in measure(cells, note):
            print(found.to_line(), file=out, flush=True)


if __name__ == "__main__":
    main()
