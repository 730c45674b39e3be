"""`unisono bench`: how fast this machine trains on how many replicas, and what limits it.

Rounds are interleaved, and the limit is measured in the same rounds: as many processes that never
talk to each other.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
        help="also race what others offer: DataParallel, MirroredStrategy, DDP, Lightning, …",
    )
    parser.add_argument(
        "--rounds",
        type=_rounds,
        metavar="N",
        help=f"how often each is measured ({_ROUNDS}; a script: once)",
    )
    parser.add_argument("--output", type=Path, metavar="D", help="write bench.json and bench.png")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    chosen = _backends(options.backend)
    if not num_gpus():
        check_cores("--replicas", max(options.replicas))
    _make_room(options.output)
    load, num_cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    print(f"load before the start: {load:.2f} on {num_cores} cores", flush=True)
    busy = "The machine is busy: figures move, ratios within a round less." if load > _BUSY else ""
    if busy:
        print(busy, flush=True)
    if max(options.replicas) > num_cores and not num_gpus():
        print(f"{max(options.replicas)} replicas share {num_cores} cores, and take turns on them.")
    titles = TITLES | {name: peer.title for name, peer in PEERS.items()}
    races: list[Race] = []
    with _ended_tidily():
        for net, backend in itertools.product(options.recipe, chosen):
            race = _race(options, net, backend)
            races.append(race)
            print(f"\n{table(race, titles)}", flush=True)
            if options.output is not None:  # What is measured is not lost with the rest.
                told = [to_json(each, titles) for each in races]
                with replacing(options.output / "bench.json") as draft:
                    draft.path.write_text(json.dumps(told, indent=1))
    if busy:
        print(f"It was at {load:.2f} before the start: measure again when it is quiet.")
    if options.output is not None:
        with replacing(options.output / "bench.png") as draft:
            plot(races, draft.path)
        print(f"\nresults: {options.output}")
    return 0


def _race(options: argparse.Namespace, net: str, backend: str) -> Race:
    if options.script is not None:
        rounds = options.rounds or 1
        return race_script(options.script, backend, options.replicas, rounds, _tell)
    ways = ways_of(backend, options.replicas, has_peers=options.peers)
    return run_race(net, backend, ways, options.rounds or _ROUNDS, _tell)


def _tell(text: str) -> None:
    """What is done now, for who waits: it is no part of the results."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _make_room(output: Path | None) -> None:
    """The folder of the results, before anything is measured for it."""
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
    """A signal ends what was started, and removes what was written for it, without a traceback."""

    def end(number: int, frame: Any) -> None:
        print("\nunisono: ended by a signal; what is not in the tables above is lost.", flush=True)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ways_of(backend: str, counts: list[int], *, has_peers: bool) -> list[Way]:
    """All ways that are raced, in the order of the table."""
    most = max(counts)
    ways = [Way("plain", most, 1), Way("one", most, 1)]
    for count in counts:
        ways.append(Way("apart", count, count))
        ways.append(Way("together", count, count, is_launched=True))
    if most > 1:
        ways.append(Way("inside", most, 1))
    for name, peer in PEERS.items():
        if has_peers and peer.backend == backend and peer.is_installed and most > 1:
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
