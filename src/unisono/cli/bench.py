"""`unisono bench`: throughput on several numbers of replicas, and what limits it.

Rounds are interleaved. The limit is measured in the same rounds: an expert's hand-written loop
without Keras. `unisono run` is measured with and without its CPU layers, which make a step cheaper
and are no parallelism.
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.backends import load_framework
from unisono.bench.nets import PER_REPLICA
from unisono.bench.peers import PEERS
from unisono.bench.race import Race, Way, run_race
from unisono.bench.report import TITLES, plot, table, to_json
from unisono.bench.script import race_script
from unisono.checkpoint.atomic import replacing
from unisono.devices import check_cores, num_gpus
from unisono.errors import LaunchError

_BUSY = 0.5
_ROUNDS = 5
_BACKENDS = ("jax", "tensorflow", "torch")


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "bench", help="measure speed-up, and what limits it", description=__doc__.splitlines()[0]
    )
    what = parser.add_mutually_exclusive_group()
    nets = ", ".join(sorted(PER_REPLICA))
    what.add_argument(
        "--recipe",
        type=_recipes,
        default=["mnist"],
        metavar="R",
        help=f"one or several of {nets} (mnist)",
    )
    what.add_argument("--script", type=Path, metavar="S", help="your own training script")
    parser.add_argument(
        "--replicas",
        type=_counts,
        default=[1, 2],
        metavar="1,2,4",
        help="how many, one number or several (1,2)",
    )
    parser.add_argument(
        "--backend",
        default="",
        metavar="B",
        help="jax, tensorflow, torch, several with commas, or all that are installed "
        "(KERAS_BACKEND, else the first)",
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="also measure other tools: DataParallel, MirroredStrategy, Lightning, …",
    )
    parser.add_argument(
        "--rounds",
        type=_rounds,
        metavar="N",
        help=f"how often each is measured ({_ROUNDS}; a script: once)",
    )
    parser.add_argument(
        "--cpu-layers",
        default="",
        metavar="L",
        help="CPU layers of `unisono run`: all, none, names with commas, or ablate: all, none and "
        "each one off in turn (all and none)",
    )
    parser.add_argument("--output", type=Path, metavar="D", help="write bench.json and bench.png")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    chosen = _backends(options.backend)
    if not num_gpus():
        check_cores("--replicas", max(options.replicas))
    _make_folder(options.output)
    load, num_cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    print(f"load before the start: {load:.2f} on {num_cores} cores", flush=True)
    busy = "The machine is busy: trust ratios within a round only." if load > _BUSY else ""
    if busy:
        print(busy, flush=True)
    if max(options.replicas) > num_cores and not num_gpus():
        print(f"{max(options.replicas)} replicas share {num_cores} cores.")
    titles = TITLES | {name: peer.title for name, peer in PEERS.items()}
    races: list[Race] = []
    with _ended_tidily():
        for net, backend in itertools.product(options.recipe, chosen):
            race = _race(options, net, backend)
            races.append(race)
            print(f"\n{table(race, titles)}", flush=True)
            if options.output is not None:  # An interrupted run keeps what was measured.
                results = [to_json(each, titles) for each in races]
                with replacing(options.output / "bench.json") as draft:
                    draft.path.write_text(json.dumps(results, indent=1))
    if busy:
        print(f"The load was {load:.2f} before the start: measure again when the machine is idle.")
    if options.output is not None:
        with replacing(options.output / "bench.png") as draft:
            plot(races, draft.path)
        print(f"\nresults: {options.output}")
    return 0


def _race(options: argparse.Namespace, net: str, backend: str) -> Race:
    if options.script is not None:
        rounds = options.rounds or 1
        return race_script(options.script, backend, options.replicas, rounds, _tell)
    choices = cpu_layer_choices(options.cpu_layers, backend)
    ways = ways_of(backend, options.replicas, has_peers=options.peers, choices=choices)
    return run_race(net, backend, ways, options.rounds or _ROUNDS, _tell)


def _tell(text: str) -> None:
    """Progress, on standard error: it is not part of the results."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _make_folder(output: Path | None) -> None:
    """Make the folder of the results before anything is measured."""
    if output is None:
        return
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise LaunchError(
            f"Asked to write the results to {output}: {error.strerror}. Give --output a folder "
            "that can be written to."
        ) from error


@contextlib.contextmanager
def _ended_tidily() -> Iterator[None]:
    """A signal ends the processes and removes temporary files, without a traceback."""

    def end(number: int, frame: Any) -> None:
        print(
            "\nunisono: ended by a signal; results that are not in the tables above are lost.",
            flush=True,
        )
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def cpu_layer_choices(asked: str, backend: str) -> dict[str, str | None]:
    """The variants of `unisono run`, with the value of UNISONO_CPU_LAYERS for each."""
    known = load_framework(backend).cpu_layers
    if num_gpus() or not known:
        return {"": None}
    if asked in ("", "all", "none"):
        every: dict[str, str | None] = {"": None, "none": "0"}
        return {name: every[name] for name in ([asked.removeprefix("all")] if asked else every)}
    if asked == "ablate":
        off = {f"no_{name}": ",".join(known - {name}) or "0" for name in sorted(known)}
        return {"": None, "none": "0", **off}
    if unknown := sorted(set(asked.split(",")) - known):
        raise LaunchError(
            f"Asked for the CPU layers {', '.join(unknown)}; {backend} has "
            f"{', '.join(sorted(known)) or 'none'}. Give some of these, all, none or ablate."
        )
    return {asked: asked}


def ways_of(
    backend: str, counts: list[int], *, has_peers: bool, choices: Mapping[str, str | None]
) -> list[Way]:
    """All ways that are raced, in the order of the table."""
    most = max(counts)
    ways = [Way("plain", most, 1), Way("one", most, 1)]
    for count in counts:
        ways.append(Way("apart", count, count))
        for variant, value in choices.items():
            way = Way("together", count, count, is_launched=True)
            ways.append(replace(way, variant=variant, cpu_layers=value))
    if most > 1:
        ways.append(Way("inside", most, 1))
    for name, peer in PEERS.items():
        is_raced = peer.is_limit or (has_peers and peer.is_installed)
        if is_raced and peer.backend == backend and most > 1:
            ways.append(Way(name, most, most if peer.has_processes else 1))
    return ways


def _backends(asked: str) -> list[str]:
    installed = [name for name in _BACKENDS if importlib.util.find_spec(name) is not None]
    if asked == "all":
        return installed
    wanted = asked.split(",") if asked else [os.environ.get("KERAS_BACKEND") or installed[0]]
    if missing := [name for name in wanted if name not in installed]:
        raise LaunchError(
            f"Asked for {', '.join(missing)}; installed are {', '.join(installed)}. Choose among "
            "those, or all."
        )
    return wanted


def _recipes(text: str) -> list[str]:
    asked = text.split(",")
    if unknown := [name for name in asked if name not in PER_REPLICA]:
        raise argparse.ArgumentTypeError(
            f"there is no recipe {unknown[0]!r} to measure; choose among {', '.join(PER_REPLICA)}"
        )
    return asked


def _counts(text: str) -> list[int]:
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,2,4")
    return counts


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rounds, 1 or more")
    return int(text)
