"""The command `unisono`: parse, call, exit code.

A sub-command is a room of its own with `add_to(commands)`, which adds its parser and sets `run` to
a function of the parsed arguments that returns the exit code. 2 is for a command line that makes
no sense, 1 for work that failed.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import unisono
from unisono import device_table, launcher, migrate
from unisono.errors import UnisonoError

_COMMANDS = (device_table, launcher, migrate)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; an error of unisono is one line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except UnisonoError as error:
        print(f"unisono: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # The reader has seen enough: `unisono devices | head -1`.
        # Python would complain of it once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="unisono", description=unisono.__doc__)
    parser.add_argument("--version", action="version", version=f"unisono {unisono.__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for room in _COMMANDS:
        room.add_to(commands)
    return parser
