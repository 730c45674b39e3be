"""Rehearse training steps for GPUs on a machine without one, and compare them with the targets.

    python -m gpu [--parts jax,tensorflow,torch] [--write docs/gpu.md] [--json rows.json]
                  [--rows more.json]

Exits with 1 when a target is not met, but for the misses that are known (`Row.known_miss`).
"""

import argparse
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

from gpu.results import BEFORE, read_rows, render, with_before, write_into, write_rows
from unisono.scratch import temporary_folder

PARTS = {"jax": "gpu.jax_rows", "tensorflow": "gpu.tensorflow_rows", "torch": "gpu.torch_rows"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--write", type=Path, help="write the tables into this document")
    parser.add_argument("--json", type=Path, help="keep the rows here")
    parser.add_argument("--rows", type=Path, action="append", default=[], help="more rows")
    asked = parser.parse_args()
    rows = []
    with temporary_folder("unisono-gpu-") as folder:
        for part in asked.parts.split(","):
            if importlib.util.find_spec(PARTS[part]) is None:
                continue
            began, out = time.monotonic(), folder / f"{part}.json"
            subprocess.run([sys.executable, "-m", PARTS[part], "--out", str(out)], check=True)
            rows += read_rows(out)
            print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
    for path in asked.rows:
        rows += read_rows(path)
    rows = with_before(rows, read_rows(BEFORE) if BEFORE.exists() else [])
    if asked.json:
        write_rows(asked.json, rows)
    table = render(rows)
    print(table)
    if asked.write:
        write_into(asked.write, table)
    missed = [row for row in rows if not row.is_met]
    for row in missed:
        found = f"{row.value:g}, not {row.target}"
        print(f"{row.backend}, {row.net}: {row.metric} is {found}", file=sys.stderr)
    return 1 if any(row.is_failure for row in rows) or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
