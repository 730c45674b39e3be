"""`unisono verify`: does a program give on N replicas what it gives on one device, and if not, why.

Runs the program unchanged, on one device twice and on replicas, for some optimizer steps. Exit
code 0 if they agree, 1 if not, 2 if there is nothing to compare.
"""

import argparse
import functools
import json
import signal
import sys
from typing import Any

from unisono.cli.run import add_program
from unisono.devices import check_cores, num_gpus
from unisono.errors import UnisonoError
from unisono.launch.request import check_program, checked_option

_OWN = ("--replicas", "--steps", "--timeout")
_OWN_SWITCHES = ("--processes", "--exact", "--same-batch", "--json")


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="compare a script on one device and on replicas",
        usage="unisono verify [options] script.py [-- arguments] | -m module [-- arguments]",
        description=__doc__.splitlines()[0],
        allow_abbrev=False,
    )
    count = checked_option(int, lambda value: value >= 1, "a whole number of at least 1")
    seconds = checked_option(float, lambda value: 0 < value < 1e9, "a number of seconds above 0")
    parser.add_argument("--replicas", type=count, default=2, metavar="N", help="how many (2)")
    parser.add_argument(
        "--steps", type=count, default=20, metavar="N", help="optimizer steps to compare (20)"
    )
    parser.add_argument(
        "--processes", action="store_true", help="one process per replica, as `unisono run` does"
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="one seed for every generator, and on TensorFlow and torch one device's random "
        "numbers for all replicas",
    )
    parser.add_argument(
        "--same-batch",
        action="store_true",
        help="for a program whose global batch grows with the replicas: one device gets that batch",
    )
    parser.add_argument(
        "--timeout", type=seconds, default=600.0, metavar="S", help="of each run, in seconds (600)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    add_program(parser)
    parser.set_defaults(run=run)
    parser.prepare = functools.partial(_with_options_first)


def run(options: argparse.Namespace) -> int:
    from unisono.verify.report import as_json
    from unisono.verify.session import Options, verify

    words = options.program[options.program[0] == "--" :]
    words = [words[0], *words[1 + (words[1:2] == ["--"]) :]]
    program = ["-m", *words] if options.is_module else words
    try:
        check_program(program)
        if not num_gpus():
            check_cores("--replicas", options.replicas)
    except UnisonoError as error:
        print(f"unisono: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _end)
    asked = Options(
        num_replicas=options.replicas,
        num_steps=options.steps,
        has_processes=options.processes,
        is_exact=options.exact,
        has_same_batch=options.same_batch,
        timeout_s=options.timeout,
    )
    try:
        result = verify(program, asked, _tell)
    except KeyboardInterrupt:
        print("unisono: interrupted; all processes of the program were ended.", file=sys.stderr)
        return 128 + signal.SIGINT
    if options.json:
        print(json.dumps(as_json(result), indent=1))
    else:
        _show(result)
    return result.code


def _show(result: Any) -> None:
    from unisono.verify.report import as_text

    if not sys.stdout.isatty():
        print(as_text(result))
        return
    import rich.console

    console = rich.console.Console(highlight=False)
    color = {0: "green", 1: "red"}.get(result.code, "yellow")
    for part in as_text(result).split("\n\n"):
        style = f"bold {color}" if part == result.verdict else None
        console.print(part, style=style, markup=False, soft_wrap=True)
        console.print()


def _with_options_first(words: list[str]) -> list[str]:
    """Options of this command may also stand right after the script, before its own arguments."""
    rest = list(words)
    before: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        before.append(word)
        if word == "-m" or (word in _OWN and rest):
            before.append(rest.pop(0))
            if word == "-m":
                break
    script = [] if "-m" in before or not rest or rest[0] == "--" else [rest.pop(0)]
    module = before[before.index("-m") :] if "-m" in before else []
    before = before[: len(before) - len(module)]
    while rest:
        name = rest[0].partition("=")[0]
        if rest[0] in _OWN_SWITCHES or (name in _OWN and "=" in rest[0]):
            before.append(rest.pop(0))
        elif name in _OWN and len(rest) > 1:
            before += [rest.pop(0), rest.pop(0)]
        else:
            break
    return [*before, *module, *script, *rest]


def _tell(text: str) -> None:
    """Progress, on standard error: it is not part of the result."""
    print(f"unisono verify: {text}", file=sys.stderr, flush=True)


def _end(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)
