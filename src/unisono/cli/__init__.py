"""The command `unisono`: parse, call, exit code.

A sub-command is a room of its own with `add_to(commands)`, which adds its parser and sets `run` to
a function of the parsed arguments that returns the exit code. 2 is for a command line that makes
no sense, 1 for work that failed.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import unisono
from unisono.cli import bench, devices, jobs, migrate, run, submit, top, train
from unisono.errors import UnisonoError

_COMMANDS = (
    devices,
    run,
    train,
    top,
    bench,
    submit,
    jobs,
    migrate,
)


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


class _Parser(argparse.ArgumentParser):
    """Lets a room look at the words of its command line before they are parsed.

    Words that it does not know are its own error, with its own usage, and not the whole command's.
    """

    prepare: Callable[[list[str]], list[str]] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.prepare is not None and args is not None:
            args = self.prepare(list(args))
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="unisono", description=unisono.__doc__)
    parser.add_argument("--version", action="version", version=f"unisono {unisono.__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for room in _COMMANDS:
        room.add_to(commands)
    return parser
