"""Sentences about runs and devices: do all of them work, and evenly?"""

import statistics
import time
from collections.abc import Sequence

from unisono.devices import Device
from unisono.monitor.events import RankEvents

# A record comes once a second.
_SILENT_S = 10.0
_QUIET_S = 3.0
_TOGETHER_S = 1.5
_LAG = 0.15
_IDLE = 0.05
_HUNGRY = 0.3
_SHORT_OF_CORES = 0.3
_MOSTLY_WAITING = 0.5
# The error of a process when another one is gone.
_ECHO = "PeerLostError"


def verdict_on_run(ranks: Sequence[RankEvents], now: float | None = None) -> str:
    """One sentence about a run: which ranks are idle, slow, stopped or gone, or that all work."""
    now = time.time() if now is None else now
    if not all(events.is_alive for events in ranks):
        return _ended(ranks)
    if stopped := [events.writer.rank for events in ranks if events.is_stopped]:
        return f"{_named(stopped)} stopped (SIGSTOP, Ctrl-Z or a debugger)"
    limit_s = _QUIET_S if any(is_stuck(e) and not is_quiet(e, now) for e in ranks) else _SILENT_S
    if silent := [e.writer.rank for e in ranks if now - last_record_time(e) > limit_s]:
        return f"{_named(silent)} silent for {limit_s:g} s and more"
    here = [events for events in ranks if events.last is not None]
    if said := _standing(here):
        return said
    if lagging := _lagging(here):
        return f"{_named(lagging)} slower than the others by {_LAG:.0%} and more"
    if (remark := remark_on_load(here)) is not None:
        return remark
    waits = [e.last.input_wait for e in here if e.last and e.last.input_wait is not None]
    if waits and statistics.median(waits) > _HUNGRY:
        return f"waits for its input {statistics.median(waits):.0%} of the time"
    return _even(ranks)


def remark_on_load(ranks: Sequence[RankEvents]) -> str | None:
    """About a run that other programs or its communication slow down; None for any other."""
    alive = [(events.writer.rank, events.last) for events in ranks if events.is_alive]
    waits = {rank: last.core_wait for rank, last in alive if last and last.core_wait is not None}
    if short := [rank for rank, wait in waits.items() if wait > _SHORT_OF_CORES]:
        most = max(waits.values())
        return (
            f"cores are short: other programs take {most:.0%} of the processor time that "
            f"{ranks_named(short)} {'needs' if len(short) == 1 else 'need'}"
        )
    # While one process computes, it is that one that the others wait for.
    idle = [last.peer_wait for _, last in alive if last and last.peer_wait is not None]
    if idle and min(idle) > _MOSTLY_WAITING:
        return (
            f"communication dominates: for {min(idle):.0%} of the time all processes wait for each "
            "other"
        )
    return None


def last_record_time(events: RankEvents) -> float:
    """When a process last wrote a record."""
    return events.last.at if events.last is not None else events.writer.began


def is_quiet(events: RankEvents, now: float) -> bool:
    """Whether a process has missed some records, so that its figures are out of date."""
    return events.is_stopped or now - last_record_time(events) > _QUIET_S


def is_stuck(events: RankEvents) -> bool:
    """Whether a process has made steps, and now makes none."""
    return events.last is not None and events.last.step > 0 and not events.last.steps_per_s


def verdict_on_devices(devices: Sequence[Device]) -> str:
    """One sentence about the GPUs; empty where there are none."""
    gpus = [device for device in devices if device.kind == "gpu" and not device.is_simulated]
    if not gpus:
        return ""
    if lost := [gpu.index for gpu in gpus if gpu.error]:
        return f"{_named(lost, 'GPU')} not answering"
    known = [gpu for gpu in gpus if gpu.utilisation is not None]
    idle = [gpu.index for gpu in known if (gpu.utilisation or 0) < _IDLE]
    if known and len(idle) == len(known):
        return "the GPU is idle" if len(gpus) == 1 else "all GPUs are idle"
    if idle:
        return f"{_named(idle, 'GPU')} idle, others work"
    if len(known) == 1:
        return "1 GPU works"
    return f"{_all(len(known), 'GPUs')} work" if known else ""


def _ended(ranks: Sequence[RankEvents]) -> str:
    """How a run ended of which some or all processes are gone: the cause, not the consequences."""
    gone = [events for events in ranks if not events.is_alive]
    failed = sorted((e for e in gone if e.last and e.last.failed_with), key=last_record_time)
    # Any other error than a lost peer is a cause.
    own = [e for e in failed if e.last and e.last.failed_with != _ECHO]
    vanished = [e for e in gone if e.last is None or not e.last.is_over]
    if vanished and not own:
        return _vanished(vanished, failed)
    for events in own or failed:
        assert events.last is not None
        return f"was stopped by {events.last.failed_with} (rank {events.writer.rank})"
    if len(gone) < len(ranks):
        return f"{_named([e.writer.rank for e in gone])} through, the others still work"
    return "has ended"


def _vanished(vanished: Sequence[RankEvents], failed: Sequence[RankEvents]) -> str:
    """About processes that ended without a last record, and those that failed as a consequence."""
    first = min(map(last_record_time, vanished))
    # The launcher kills the others some seconds later; they write no last record either.
    causes = [e.writer.rank for e in vanished if last_record_time(e) - first < _TOGETHER_S]
    said = f"{_named(causes)} gone without a word: killed?"
    if failed:
        echoes = sorted(events.writer.rank for events in failed)
        said += f" Hence {_ECHO} at {ranks_named(echoes)}"
    return said


def _standing(ranks: Sequence[RankEvents]) -> str:
    """About processes that make no steps; empty where all do.

    A single one is named only if another has made steps since: else it may be waiting itself.
    """
    words = [(e.writer.rank, e.last) for e in ranks if e.last is not None]
    idle = [(rank, last) for rank, last in words if not last.steps_per_s]
    if not idle:
        return ""
    if all(last.step == 0 for _, last in idle) and len(idle) == len(words):
        return "has made no step yet"
    moved = max((last.at for _, last in words if last.steps_per_s), default=0.0)
    if alone := [rank for rank, last in idle if last.at <= moved]:
        return f"{_named(alone)} idle: no step for some time"
    return "has made no step for some time"


def _even(ranks: Sequence[RankEvents]) -> str:
    """All is well.

    Processes of other machines publish there, so of them it is only known that they are.
    """
    missing = ranks[0].writer.world_size - len(ranks)
    here, elsewhere = (" here", f" ({missing} more elsewhere)") if missing > 0 else ("", "")
    count = sum(events.writer.num_replicas for events in ranks)
    if count == 1:
        return f"1 replica{here} works{elsewhere}"
    return f"{_all(count, 'replicas')}{here} work evenly{elsewhere}"


def _lagging(ranks: Sequence[RankEvents]) -> list[int]:
    """Ranks that are slower than the others by some percent."""
    rates = [events.last.steps_per_s or 0.0 for events in ranks if events.last]
    if len(rates) < 2:
        return []
    usual = statistics.median(rates)
    return [
        events.writer.rank
        for events, rate in zip(ranks, rates, strict=True)
        if rate < (1 - _LAG) * usual
    ]


def ranks_named(numbers: Sequence[int], noun: str = "rank") -> str:
    """Numbers with their noun.

    >>> ranks_named([0, 2])
    'ranks 0, 2'
    """
    return f"{noun}{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


def _named(numbers: Sequence[int], noun: str = "rank") -> str:
    return f"{ranks_named(numbers, noun)} {'is' if len(numbers) == 1 else 'are'}"


def _all(count: int, nouns: str) -> str:
    return f"both {nouns}" if count == 2 else f"all {count} {nouns}"
