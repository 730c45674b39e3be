"""What a race showed: a table, shares of a step, and a verdict in plain words."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unisono.bench.race import Lap, Race
from unisono.devices import format_replicas

# What a way is held against: measured, or for a user's script worked out from its first run.
_LIMITS = ("apart", "ideal")
_MUCH = 0.08
_ONE_REPLICA = ("plain", "one")


@dataclass(frozen=True)
class Row:
    """One way's results: medians over rounds."""

    way: str
    title: str
    num_replicas: int
    images_per_s: float
    spread: float | None
    """Largest less smallest, over the median; of several rounds."""
    of_limit: float | None
    """Of what as many processes that never talk reach in the same round."""
    of_plain: float | None
    """Of plain Keras in one process on all cores."""
    ours_of_it: float | None
    """What `unisono run` on as many replicas reaches, of this way in the same round."""
    peak_mib: float | None


@dataclass(frozen=True)
class Shares:
    """Where the time of a step goes, of so many replicas together."""

    num_replicas: int
    speed_up: float | None
    """Over `base`."""
    base: str
    """One replica under `unisono run`, or plain Keras in one process where that was not raced."""
    efficiency: float
    """Of the limit: of as many processes that never talk, or of so many times one replica."""
    input: float
    """For its batches, as long as they take by themselves."""
    computing: float
    """The rest of what a step takes without the others."""
    communicating: float
    waiting: float
    """For the slowest."""


TITLES = {
    "plain": "plain Keras, 1 process, all cores",
    "one": "unisono, 1 replica, all cores",
    "apart": "the limit: processes that never talk",
    "ideal": "ideal: as many times one replica",
    "together": "unisono run",
    "inside": "unisono.parallel in one process",
}


def rows(race: Race, titles: dict[str, str]) -> list[Row]:
    """One for each way that ran, in their order."""
    found = []
    for name, laps in race.laps.items():
        kind, _, count = name.rpartition("-")
        rates = [lap.images_per_s for lap in laps]
        median = _rate(laps)
        found.append(
            Row(
                name,
                titles.get(kind, kind),
                1 if kind in _ONE_REPLICA else int(count),
                median,
                (max(rates) - min(rates)) / median if len(rates) > 1 else None,
                ratio(laps, _limit(race, count)) if kind not in _LIMITS else None,
                ratio(laps, _plain(race)) if kind != "plain" else None,
                _ours_of(laps, race.laps.get(f"together-{count}")),
                _peak_mib(laps),
            )
        )
    return found


def ratio(laps: Sequence[Lap], others: Sequence[Lap] | None) -> float | None:
    """The median of the ratios within each round."""
    return _ratio(laps, others) if others else None


def _ratio(laps: Sequence[Lap], others: Sequence[Lap]) -> float:
    pairs = zip(laps, others, strict=False)  # One of them may have ended early.
    return statistics.median(a.images_per_s / b.images_per_s for a, b in pairs)


def shares(race: Race) -> list[Shares]:
    """Where the time goes, for each number of replicas that ran together and apart."""
    found = []
    for name, laps in race.laps.items():
        kind, _, count = name.rpartition("-")
        alone = _limit(race, count)
        if kind != "together" or alone is None:
            continue
        parts = [_parts(lap, other) for lap, other in zip(laps, alone, strict=False)]
        means = [statistics.median(values) for values in zip(*parts, strict=True)]
        base, one = "1 replica", race.laps.get("together-1")
        if one is None:
            base, one = "plain Keras", _plain(race)
        found.append(Shares(int(count), ratio(laps, one), base, _ratio(laps, alone), *means))
    return found


def verdict(race: Race) -> str:
    """What limits the run, and what to change."""
    found = shares(race)
    if not found:
        return "Give --replicas more than one number to see what limits a run."
    last, replicas = found[-1], format_replicas(found[-1].num_replicas)
    what = {name: getattr(last, name) for name in ("input", "communicating", "waiting")}
    worst = max(what, key=lambda name: what[name])
    if what[worst] < _MUCH:
        help_ = "more replicas will help, and a faster device will"
        if last.num_replicas == 1:
            help_ = "a faster device will help; ask for --replicas 1,2 to see whether a second does"
        return f"Computing takes {last.computing:.0%} of a step on {replicas}: {help_}."
    if worst == "input":
        return (
            f"Making batches takes {last.input:.0%} of a step on {replicas}. "
            "Give arrays, or a data set that prepares its batches ahead; move what is done to each "
            "sample into the model."
        )
    if worst == "communicating":
        return (
            f"Adding up gradients takes {last.communicating:.0%} of a step on {replicas}. Raise "
            "the per-replica batch, or let a step compute more: then there are fewer sums for the "
            "same work."
        )
    return (
        f"Replicas wait {last.waiting:.0%} of a step for the slowest. Look with `unisono top` for "
        "other programs on its device or cores, and for input that is slow on one of them."
    )


def table(race: Race, titles: dict[str, str]) -> str:
    """Aligned columns for a terminal."""
    ratios = ("of the limit", "of plain", "unisono run / it")
    head = ("", "replicas", "images/s", "spread", *ratios, "peak MiB")
    body = [
        (
            row.title,
            str(row.num_replicas),
            f"{row.images_per_s:,.0f}",
            "" if row.spread is None else f"{row.spread:.0%}",
            "" if row.of_limit is None else f"{row.of_limit:.3f}",
            "" if row.of_plain is None else f"{row.of_plain:.2f}",
            "" if row.ours_of_it is None else f"{row.ours_of_it:.2f}",
            "" if row.peak_mib is None else f"{row.peak_mib:,.0f}",
        )
        for row in rows(race, titles)
    ]
    widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in (head, *body)
    ]
    lines += [_line(share) for share in shares(race)]
    for name, why in race.failed.items():
        what = "ended early" if name in race.laps else "not measured"
        lines.append(f"{name}: {what}. {why}")
    return "\n".join([f"{race.net}, {race.backend}", *lines, verdict(race)])


def _line(share: Shares) -> str:
    speed_up = ""
    if share.speed_up is not None:
        speed_up = f"speed-up {share.speed_up:.2f} (over {share.base}), "
    return (
        f"{format_replicas(share.num_replicas)}: {speed_up}"
        f"efficiency {share.efficiency:.2f} (of the limit); "
        f"input {share.input:.0%}, computing {share.computing:.0%}, communicating "
        f"{share.communicating:.0%}, waiting for the slowest {share.waiting:.0%}"
    )


def to_json(race: Race, titles: dict[str, str]) -> dict[str, Any]:
    return {
        "net": race.net,
        "backend": race.backend,
        "load_before": race.load,
        "rows": [asdict(row) for row in rows(race, titles)],
        "shares": [asdict(share) for share in shares(race)],
        "laps": {name: [asdict(lap) for lap in laps] for name, laps in race.laps.items()},
        "failed": race.failed,
        "verdict": verdict(race),
    }


def plot(races: Sequence[Race], path: Any) -> None:
    """Throughput over replicas, a panel for each net, with the limit of each backend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    nets = list(dict.fromkeys(race.net for race in races))
    figure = Figure(figsize=(1 + 6 * len(nets), 5), layout="constrained")
    shown: dict[str, Any] = {}
    for axes, net in zip(figure.subplots(1, len(nets), squeeze=False)[0], nets, strict=True):
        for race in races:
            if race.net == net:
                _draw(axes, race)
        axes.set(title=net, xlabel="replicas", ylabel="images per second")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(bottom=0)
        axes.margins(x=0.1)
        lines, labels = axes.get_legend_handles_labels()
        shown |= dict(zip(labels, lines, strict=True))
    columns = len({race.backend for race in races})
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=columns)
    figure.savefig(path, dpi=120)


def _draw(axes: Any, race: Race) -> None:
    """What `unisono run` reached, the dotted limit from one replica on, and plain Keras."""
    names = [name for name in race.laps if name.startswith("together-")]
    counts = sorted(int(name.rpartition("-")[2]) for name in names)
    if not counts:
        return
    ours = [_rate(race.laps[f"together-{count}"]) for count in counts]
    (line,) = axes.plot(counts, ours, "o-", label=f"{race.backend}: unisono run")
    style = {"color": line.get_color()}
    limits = [(n, _rate(laps)) for n in counts if (laps := _limit(race, str(n)))]
    if limits and limits[0][0] > 1:
        limits = [(1, limits[0][1] / limits[0][0]), *limits]
    if limits:
        axes.plot(*zip(*limits, strict=True), ":", label=f"{race.backend}: the limit", **style)
    if plain := _plain(race):
        label = f"{race.backend}: plain Keras, all cores"
        axes.axhline(_rate(plain), linestyle="--", linewidth=0.8, label=label, **style)


def _rate(laps: Sequence[Lap]) -> float:
    return statistics.median(lap.images_per_s for lap in laps)


def _peak_mib(laps: Sequence[Lap]) -> float | None:
    known = [lap.peak_bytes for lap in laps if lap.peak_bytes is not None]
    return max(known) / 2**20 if known else None


def _plain(race: Race) -> list[Lap] | None:
    return next((laps for name, laps in race.laps.items() if name.startswith("plain-")), None)


def _ours_of(laps: list[Lap], ours: list[Lap] | None) -> float | None:
    return ratio(ours, laps) if ours is not None and ours is not laps else None


def _limit(race: Race, count: str) -> list[Lap] | None:
    names = [f"{kind}-{count}" for kind in _LIMITS]
    return next((race.laps[name] for name in names if name in race.laps), None)


def _parts(lap: Lap, alone: Lap) -> tuple[float, float, float, float]:
    """Input, computing, communicating and waiting, as shares of a pass."""
    by_itself = min(1.0, alone.seconds / lap.seconds)
    taking = min(by_itself, lap.input_s / lap.seconds)
    waiting = min(1.0 - by_itself, max(0.0, lap.waited_s - lap.slowest_wait_s) / lap.seconds)
    return taking, by_itself - taking, 1.0 - by_itself - waiting, waiting
