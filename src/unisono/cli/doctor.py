"""`unisono doctor`: is this machine set up for training on many devices?

Takes less than three minutes. The exit code is 1 where something is broken.
"""

import argparse
import sys
from typing import Any


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check whether this machine is set up for many devices",
        description=__doc__.splitlines()[0],
    )
    parser.add_argument("--json", action="store_true", help="for bug reports and programs")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="one check or group, such as links or training; may be repeated",
    )
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    # Here, as no other command needs it.
    from unisono.doctor import CHECKS, examine
    from unisono.doctor.report import Printer, print_json

    known = {check.name for check in CHECKS} | {check.group.lower() for check in CHECKS}
    for name in options.only:
        if name.lower() not in known:
            options.parser.error(f"--only {name}: choose among {', '.join(sorted(known))}")
    if options.json:
        report = examine(options.only)
        print_json(report)
        return report.exit_code
    printer = Printer(sys.stdout)
    report = examine(options.only, printer.show)
    printer.close(report)
    return report.exit_code
