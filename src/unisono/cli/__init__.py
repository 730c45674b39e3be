"""The command `unisono`: parse, call, exit code.

A sub-command is a module with `add_to(commands)`, which adds its parser and sets `run` to a
function of the parsed arguments that returns the exit code: 2 for an invalid command line, 1 for a
failure.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import unisono
from unisono.cli import bench, devices, doctor, jobs, migrate, run, submit, top, train, verify
from unisono.errors import UnisonoError

_COMMANDS = (
    devices,
    doctor,
    run,
    train,
    top,
    verify,
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
    except BrokenPipeError:  # The reader has closed: `unisono devices | head -1`.
        # Python would report it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class _Parser(argparse.ArgumentParser):
    """Lets a sub-command prepare its arguments before they are parsed.

    Unknown arguments are an error of the sub-command, with its own usage.
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
    for command in _COMMANDS:
        command.add_to(commands)
    return parser
