"""The glance: are all devices working, and evenly? From readings and events alone."""

import statistics
import time
from collections.abc import Sequence

from unisono.devices import Device
from unisono.events import RankEvents

_STALE_S = 10.0
_LAG = 0.15
_IDLE = 0.05
_HUNGRY = 0.3


def verdict_on_run(ranks: Sequence[RankEvents], now: float | None = None) -> str:
    """One sentence about a run: how fast it is, and who is idle, late or gone."""
    now = time.time() if now is None else now
    gone = [events.writer.rank for events in ranks if not events.is_alive]
    size = ranks[0].writer.world_size
    if len(gone) == len(ranks):
        return _ended(ranks)
    if gone:
        return f"{_named(gone)} gone"
    here = [events for events in ranks if events.last is not None]
    silent = [e.writer.rank for e in here if e.last and now - e.last.at > _STALE_S]
    if silent:
        return f"{_named(silent)} silent for {_STALE_S:g} s and more"
    waiting = [e.writer.rank for e in here if e.last and not e.last.steps_per_s]
    if waiting:
        return f"{_named(waiting)} idle: no step for some time"
    if lagging := _lagging(here):
        return f"{_named(lagging)} slower than the others by {_LAG:.0%} and more"
    waits = [e.last.input_wait for e in here if e.last and e.last.input_wait is not None]
    if waits and statistics.median(waits) > _HUNGRY:
        return f"waits for its input {statistics.median(waits):.0%} of the time"
    missing = size - len(ranks)
    elsewhere = f" ({missing} more elsewhere)" if missing > 0 else ""
    count = sum(events.writer.num_replicas for events in ranks)
    return f"all {count} replica{'s' * (count != 1)} here work evenly{elsewhere}"


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
        return "all GPUs are idle"
    if idle:
        return f"{_named(idle, 'GPU')} idle, others work"
    return f"all {len(known)} GPUs work" if known else ""


def _ended(ranks: Sequence[RankEvents]) -> str:
    """How a run ended of which no process is left."""
    failed = [e for e in ranks if e.last is not None and e.last.failed_with]
    if failed:
        first = min(failed, key=lambda e: e.last.at if e.last is not None else 0.0)
        assert first.last is not None
        return f"was stopped by {first.last.failed_with} (rank {first.writer.rank})"
    if cut := [e.writer.rank for e in ranks if e.last is None or not e.last.is_over]:
        return f"has ended before its training: {_named(cut)} gone"
    return "has ended"


def _lagging(ranks: Sequence[RankEvents]) -> list[int]:
    """Processes of a run step together, so who is late keeps no others waiting for its input."""
    rates = [events.last.steps_per_s or 0.0 for events in ranks if events.last]
    if len(rates) < 2:
        return []
    usual = statistics.median(rates)
    return [
        events.writer.rank
        for events, rate in zip(ranks, rates, strict=True)
        if rate < (1 - _LAG) * usual
    ]


def _named(numbers: Sequence[int], noun: str = "rank") -> str:
    listed = ", ".join(map(str, numbers))
    return f"{noun} {listed} is" if len(numbers) == 1 else f"{noun}s {listed} are"
