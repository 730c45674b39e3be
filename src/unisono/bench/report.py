"""The results of a race: a table, where the time of a step goes, and a verdict."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unisono.bench.peers import PEERS
from unisono.bench.race import Lap, Race
from unisono.devices import format_replicas

_LIMITS = (*(name for name, peer in PEERS.items() if peer.is_limit), "ideal")
"""An expert's hand-written loop, or for a user's script a multiple of its first run."""
_ALONE = ("apart", "ideal")
"""What a step takes without communication is measured by these."""
_MUCH = 0.08
_ONE_REPLICA = ("plain", "one")


@dataclass(frozen=True)
class Row:
    """The results of one way: medians over rounds."""

    way: str
    title: str
    num_replicas: int
    images_per_s: float
    spread: float | None
    """Largest minus smallest, over the median, if there are several rounds."""
    of_limit: float | None
    """Relative to an expert's hand-written loop without Keras, in the same round."""
    of_apart: float | None
    """Relative to as many processes of plain Keras that never communicate."""
    of_plain: float | None
    """Relative to plain Keras in one process on all cores."""
    ours_of_it: float | None
    """`unisono run` on as many replicas, relative to this way in the same round."""
    peak_mib: float | None


@dataclass(frozen=True)
class StepShares:
    """Where the time of a step goes under `unisono run`."""

    title: str
    num_replicas: int
    speed_up: float | None
    """Over `base`."""
    base: str
    """One replica under `unisono run`, or plain Keras in one process if that was not raced."""
    efficiency: float
    """Relative to processes that never communicate, or to a multiple of one replica."""
    input: float
    """Fetching batches, measured without training."""
    computing: float
    """The rest of a step without communication."""
    communicating: float
    waiting: float
    """For the slowest replica."""


TITLES = {
    "plain": "plain Keras, 1 process, all cores",
    "one": "unisono, 1 replica, all cores",
    "apart": "plain Keras, processes that never talk",
    "ideal": "ideal: as many times one replica",
    "together": "unisono run",
    "together:none": "unisono run, no CPU layers",
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
                title_of(kind, titles),
                1 if kind in _ONE_REPLICA else int(count),
                median,
                (max(rates) - min(rates)) / median if len(rates) > 1 else None,
                ratio(laps, _find(race, _LIMITS, count)) if kind not in _LIMITS else None,
                ratio(laps, race.laps.get(f"apart-{count}")) if kind != "apart" else None,
                ratio(laps, _plain(race)) if kind != "plain" else None,
                _ours_of(laps, _ours(race, count)),
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


def shares(race: Race) -> list[StepShares]:
    """Where the time goes, for each `unisono run` that can be compared with separate processes."""
    found = []
    for name, laps in race.laps.items():
        kind, _, count = name.rpartition("-")
        alone = _find(race, _ALONE, count)
        if kind.partition(":")[0] != "together" or alone is None:
            continue
        parts = [_parts(lap, other) for lap, other in zip(laps, alone, strict=False)]
        means = [statistics.median(values) for values in zip(*parts, strict=True)]
        base, one = "1 replica", race.laps.get(f"{kind}-1")
        if one is None:
            base, one = "plain Keras", _plain(race)
        title = title_of(kind, TITLES)
        speed_up, efficiency = ratio(laps, one), _ratio(laps, alone)
        found.append(StepShares(title, int(count), speed_up, base, efficiency, *means))
    return found


def verdict(race: Race) -> str:
    """What limits the run, and what to change."""
    found = shares(race)
    if not found:
        return "Give --replicas more than one number to see what limits a run."
    most = max(each.num_replicas for each in found)
    last = next(each for each in found if each.num_replicas == most)
    replicas = format_replicas(most)
    what = {name: getattr(last, name) for name in ("input", "communicating", "waiting")}
    worst = max(what, key=lambda name: what[name])
    if what[worst] < _MUCH:
        help_ = "more replicas or a faster device will help"
        if last.num_replicas == 1:
            help_ = "a faster device will help; give --replicas 1,2 to see whether a second does"
        return f"Computing takes {last.computing:.0%} of a step on {replicas}: {help_}."
    if worst == "input":
        return (
            f"Input takes {last.input:.0%} of a step on {replicas}. Use arrays or a dataset that "
            "prefetches; move preprocessing into the model."
        )
    if worst == "communicating":
        return (
            f"Communication takes {last.communicating:.0%} of a step on {replicas}. Raise the "
            "per-replica batch size: then there are fewer all-reduces for the same work."
        )
    return (
        f"Replicas wait {last.waiting:.0%} of a step for the slowest. Use `unisono top` to find "
        "other programs on its device or cores, or slow input on one of them."
    )


def table(race: Race, titles: dict[str, str]) -> str:
    """Aligned columns for a terminal."""
    ratios = ("of the limit", "of apart", "of plain", "unisono run / it")
    head = ("", "replicas", "images/s", "spread", *ratios, "peak MiB")
    body = [
        (
            row.title,
            str(row.num_replicas),
            f"{row.images_per_s:,.0f}",
            "" if row.spread is None else f"{row.spread:.0%}",
            "" if row.of_limit is None else f"{row.of_limit:.3f}",
            "" if row.of_apart is None else f"{row.of_apart:.3f}",
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


def _line(share: StepShares) -> str:
    speed_up = ""
    if share.speed_up is not None:
        speed_up = f"speed-up {share.speed_up:.2f} (over {share.base}), "
    return (
        f"{share.title}, {format_replicas(share.num_replicas)}: {speed_up}"
        f"efficiency {share.efficiency:.2f} (of processes that never talk); "
        f"input {share.input:.0%}, computing {share.computing:.0%}, communication "
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
    """Throughput over replicas, a panel per net, with the limit of each backend."""
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
    """`unisono run`, the limit as a dotted line, and plain Keras as a dashed one."""
    names = [name for name in race.laps if name.partition(":")[0].startswith("together")]
    counts = sorted({int(name.rpartition("-")[2]) for name in names})
    if not counts:
        return
    ours = [_rate(_ours(race, str(count)) or []) for count in counts]
    (line,) = axes.plot(counts, ours, "o-", label=f"{race.backend}: unisono run")
    style = {"color": line.get_color()}
    limits = [(n, _rate(laps)) for n in counts if (laps := _find(race, _LIMITS, str(n)))]
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


def title_of(kind: str, titles: dict[str, str]) -> str:
    """The title of a way; `together:no_pool` is a run without the CPU layer "pool"."""
    base, _, variant = kind.partition(":")
    if kind in titles or not variant:
        return titles.get(kind, kind)
    what = f"without {variant[3:]}" if variant.startswith("no_") else f"CPU layers {variant}"
    return f"{titles.get(base, base)}, {what}"


def _ours(race: Race, count: str) -> list[Lap] | None:
    """`unisono run` as it comes, or the first variant of it that was raced."""
    names = [
        name
        for name in race.laps
        if name.startswith(("together-", "together:")) and name.rpartition("-")[2] == count
    ]
    return race.laps[min(names, key=lambda name: ":" in name)] if names else None


def _find(race: Race, kinds: Sequence[str], count: str) -> list[Lap] | None:
    names = [f"{kind}-{count}" for kind in kinds]
    return next((race.laps[name] for name in names if name in race.laps), None)


def _parts(lap: Lap, alone: Lap) -> tuple[float, float, float, float]:
    """Input, computing, communication and waiting, as fractions of a pass."""
    without_others = min(1.0, alone.seconds / lap.seconds)
    taking = min(without_others, lap.input_s / lap.seconds)
    waiting = min(1.0 - without_others, max(0.0, lap.waited_s - lap.slowest_wait_s) / lap.seconds)
    return taking, without_others - taking, 1.0 - without_others - waiting, waiting
