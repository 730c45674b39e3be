"""The exactness table: how far parallel training is from plain Keras on one device.

    python -m exactness [--backend jax,torch] [--replicas 2,4] [--cases "batch_norm*"]
                                      [--processes 2] [--json cells.jsonl]
                                      [--write docs/exactness.md]

One process for each backend runs all cases; where a case ends or blocks it, a new one goes on.
Exits with 1 when a cell is an error or beyond its tolerance.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from exactness.results import (
    BACKENDS,
    Cell,
    column_name,
    explain,
    read_cells,
    render,
    write_cells,
    write_into,
)
from unisono.scratch import temporary_folder

POLL_S = 0.5
MEASURE = (sys.executable, "-m", "exactness.measure")
RUN = (sys.executable, "-m", "unisono", "run")


def measure_backend(
    backend: str, command: Sequence[str], *, folder: Path, timeout_s: float
) -> list[Cell]:
    """Measure all cells of a backend; one that kills or blocks its process becomes an error."""
    out = folder / f"{backend}.jsonl"
    now = out.with_suffix(".now")
    while True:
        now.unlink(missing_ok=True)
        ended = run_process(backend, [*command, "--out", str(out)], out, timeout_s)
        if ended is None:
            return read_cells(out)
        if not now.exists():
            raise RuntimeError(
                f"The process that measures {backend} {ended} before its first case; its output "
                "stands above."
            )
        lost = Cell(**json.loads(now.read_text()))
        lost = replace(lost, error=lost.error or ended)
        with out.open("a") as file:
            print(lost.to_line(), file=file)


def run_process(backend: str, command: Sequence[str], out: Path, timeout_s: float) -> str | None:
    """Run one measuring process to its end; says how it failed, or None."""
    settings = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = subprocess.Popen(
        command,
        env={**os.environ, **settings},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return watch(process, out, timeout_s)
    finally:
        end_group(process)


def watch(process: "subprocess.Popen[bytes]", out: Path, timeout_s: float) -> str | None:
    """Report cells as they come in, until the process ends or nothing comes any more."""
    seen, last_news = len(read_cells(out)), time.monotonic()
    while True:
        ended = process.poll() is not None
        cells = read_cells(out)
        if len(cells) > seen:
            report(cells[seen:])
            seen, last_news = len(cells), time.monotonic()
        if ended:
            return None if process.returncode == 0 else f"ended with code {process.returncode}"
        if time.monotonic() - last_news > timeout_s:
            return f"gave no result within {timeout_s:.0f} s"
        time.sleep(POLL_S)


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process, with the replicas that it started, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def report(cells: Sequence[Cell]) -> None:
    for cell in cells:
        place = f"{column_name(cell.backend, cell.processes, cell.replicas)}: {cell.case}"
        if cell.failed:
            print(f"{place}: FAILED, {explain(cell)}", flush=True)
        else:
            found = "—" if cell.deviation is None else f"{cell.deviation:.1e}"
            print(f"{place}: {found}", flush=True)


def merged(kept: Sequence[Cell], new: Sequence[Cell]) -> list[Cell]:
    """Cells of an earlier run and of this one, this one's winning, in the table's order."""
    by_key = {cell.key: cell for cell in (*kept, *new)}
    return sorted(by_key.values(), key=lambda cell: (cell.position, cell.key))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default=",".join(BACKENDS))
    parser.add_argument("--replicas", default="1,2,3,4")
    parser.add_argument("--processes", type=int, default=1, help="one replica in each of so many")
    parser.add_argument("--cases", default="*", help="patterns of case names or group titles")
    parser.add_argument("--json", type=Path, help="keep cells here, with those of earlier runs")
    parser.add_argument("--write", type=Path, help="write the table into this document")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one cell")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # replicas end too
    command = [*MEASURE, "--replicas", asked.replicas, "--cases", asked.cases]
    if asked.processes > 1:
        count = str(asked.processes)
        command = [*RUN, "--replicas", count, *MEASURE[1:], "--replicas", count]
        command += ["--cases", asked.cases]
    cells = read_cells(asked.json) if asked.json else []
    with temporary_folder("unisono-exactness-") as folder:
        for backend in asked.backend.split(","):
            new = measure_backend(backend, command, folder=folder, timeout_s=asked.timeout)
            cells = merged(cells, new)
            if asked.json:
                write_cells(asked.json, cells)
    table = render(cells)
    print(table)
    if asked.write:
        write_into(asked.write, table)
    return 1 if not cells or any(cell.failed for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
