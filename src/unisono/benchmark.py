"""`unisono bench`: how fast this machine trains on how many replicas, and what limits it.

Rounds are interleaved, and the limit is measured in the same rounds: as many processes that never
talk to each other.
"""

import argparse
import importlib.util
import itertools
import json
import os
from pathlib import Path
from typing import Any

from unisono.bench.nets import PER_REPLICA
from unisono.bench.peers import PEERS
from unisono.bench.race import Race, Way, run_race
from unisono.bench.report import TITLES, plot, table, to_json
from unisono.bench.script import race_script
from unisono.errors import BenchError

_BUSY = 0.5
_BACKENDS = ("jax", "tensorflow", "torch")


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "bench", help="measure speed-up, and what limits it", description=__doc__.splitlines()[0]
    )
    what = parser.add_mutually_exclusive_group()
    nets = ", ".join(sorted(PER_REPLICA))
    what.add_argument(
        "--recipe", type=_recipes, default=["mnist"], metavar="R", help=f"one or several of {nets}"
    )
    what.add_argument("--script", type=Path, metavar="S", help="your own training script")
    parser.add_argument("--replicas", type=_counts, default=[1, 2], metavar="1,2,4")
    parser.add_argument("--backend", default="", metavar="all", help="one, several, or all")
    parser.add_argument("--peers", action="store_true", help="others' ways, in the same rounds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, metavar="D", help="write bench.json and bench.png")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    load = os.getloadavg()[0]
    print(f"load before the start: {load:.2f} on {len(os.sched_getaffinity(0))} cores", flush=True)
    if load > _BUSY:
        print("The machine is busy: figures move, ratios within a round less.", flush=True)
    chosen = _backends(options.backend)
    titles = TITLES | {name: peer.title for name, peer in PEERS.items()}
    races: list[Race] = []
    for net, backend in itertools.product(options.recipe, chosen):
        if options.script is not None:
            race = race_script(options.script, backend, options.replicas)
        else:
            ways = ways_of(backend, options.replicas, has_peers=options.peers)
            race = run_race(net, backend, ways, options.rounds)
        races.append(race)
        print(f"\n{table(race, titles)}", flush=True)
        if options.output is not None:  # What is measured is not lost with the rest.
            options.output.mkdir(parents=True, exist_ok=True)
            told = [to_json(each, titles) for each in races]
            (options.output / "bench.json").write_text(json.dumps(told, indent=1))
    if options.output is not None:
        plot(races, options.output / "bench.png")
        print(f"\nresults: {options.output}")
    return 0


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
        raise BenchError(
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
