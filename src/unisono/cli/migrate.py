"""The command `unisono migrate`: its options, what it prints, its exit code."""

import argparse
import difflib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.compat.migrate.files import Remark, read, replace
from unisono.compat.migrate.notebooks import migrate_notebook
from unisono.errors import DataError


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "migrate",
        help="rewrite an old script or notebook to Keras 3 and unisono",
        description="Rewrite an old script or notebook to Keras 3 and unisono. Shows the changes "
        "as a diff unless --write is given.",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--diff", action="store_true", help="show the changes (the default)")
    how.add_argument(
        "--write", action="store_true", help="change the file, and keep the old one as a backup"
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="file", help="a .py or .ipynb file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("libcst") is None:
        raise DataError(
            "unisono migrate needs LibCST, which is not installed. pip install 'unisono[migrate]'."
        )
    failures = 0
    for path in options.files:
        try:
            _migrate(path, is_written=options.write)
        except DataError as error:
            # The other files are none the worse for it.
            print(f"unisono: {error} Nothing was changed.", file=sys.stderr)
            failures += 1
    return 1 if failures else 0


def _migrate(path: Path, *, is_written: bool) -> None:
    before = read(path)
    if path.suffix == ".ipynb":
        after, changes, remarks = migrate_notebook(before, str(path))
    else:
        from unisono.compat.migrate.source import migrate_source

        migrated = migrate_source(before, str(path))
        after, remarks = migrated.code, migrated.remarks
        changes = [(str(path), migrated.lines_before, migrated.lines_after)]
    if after == before:
        print(f"{path}: nothing to change.")
    elif is_written:
        backup = replace(path, before, after)
        print(f"{path}: changed; the old file is {backup.name}.")
    else:
        sys.stdout.writelines(_diff(changes))
    _tell(path, remarks)


def _diff(changes: Sequence[tuple[str, list[str], list[str]]]) -> list[str]:
    found: list[str] = []
    for name, before, after in changes:
        lines = difflib.unified_diff(before, after, name, f"{name} (migrated)")
        found += [line if line.endswith("\n") else line + "\n" for line in lines]
    return found


def _tell(path: Path, remarks: Sequence[Remark]) -> None:
    if not remarks:
        return
    noun = "place needs" if len(remarks) == 1 else "places need"
    print(f"{len(remarks)} {noun} you, by line of the migrated file:")
    for remark in remarks:
        print(f"  {path}, {remark.place}: {remark.text}")
