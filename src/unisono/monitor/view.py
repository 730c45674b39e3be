"""Readings and events as lines of text that fit a window; a pure function of both."""

import time
from collections.abc import Iterator, Mapping, Sequence

from unisono.devices import Device, format_bytes
from unisono.events import RankEvents
from unisono.monitor.readings import Readings, Usage
from unisono.monitor.verdict import verdict_on_devices, verdict_on_run

_BAR = "█▉▊▋▌▍▎▏"
_NARROW = 70
_SHORTEST_NAME = 8
_ROOMY = 1000


def lines(
    readings: Readings,
    runs: Mapping[str, Sequence[RankEvents]],
    width: int,
    height: int | None = None,
    now: float | None = None,
    *,
    is_cut: bool = True,
) -> list[str]:
    """The whole view, laid out for a width; no line is longer than it where lines are cut."""
    now = time.time() if now is None else now
    room = width if is_cut else _ROOMY
    parts = [list(_of_runs(runs, readings, room, now)), list(_of_devices(readings, width))]
    found = [*parts[1], "", *(parts[0] or ["No run of unisono is on this machine."])]
    found = [line[: width if is_cut else None].rstrip() for line in found]
    if height is not None and len(found) > height:
        more = len(found) - height + 1
        found = [*found[: height - 1], f"… {more} more lines: a taller window shows them"[:width]]
    return found


def bar(share: float | None, width: int) -> str:
    """A share of one as a bar.

    >>> bar(0.5, 4)
    '██  '
    """
    if share is None:
        return "?".ljust(width)
    filled = min(max(share, 0.0), 1.0) * width
    whole = int(filled)
    rest = int((filled - whole) * 8)
    text = _BAR[0] * whole + (_BAR[8 - rest] if rest else "")
    return text.ljust(width)


def short_name(program: str, length: int) -> str:
    """A program and its arguments, as much of it as there is room for.

    >>> short_name("/home/ada/train.py --epochs 20", 30)
    'train.py --epochs 20'
    >>> short_name("/home/ada/train.py --epochs 20", 14)
    'train.py --ep…'
    """
    path, space, rest = program.partition(" ")
    name = path.rpartition("/")[2] + space + rest
    length = max(length, _SHORTEST_NAME)
    return name if len(name) <= length else name[: length - 1] + "…"


def _of_devices(readings: Readings, width: int) -> Iterator[str]:
    if said := verdict_on_devices(readings.devices):
        yield f"Devices: {said}"
    for device in readings.devices:
        yield _device(device, width)
        for process in device.processes:
            usage = next((u for u in readings.usages if u.pid == process.pid), None)
            yield _holder(process.pid, process.user, process.used_bytes, usage)
    size = 4 if width < _NARROW else 8
    cells = [f"{i:>3} {bar(load, size)} {load:4.0%}" for i, load in enumerate(readings.cores)]
    each = max(map(len, cells), default=1) + 2
    across = max(1, width // each)
    for start in range(0, len(cells), across):
        yield "  ".join(cells[start : start + across])
    yield from (f"({note})" for note in readings.notes)


def _device(device: Device, width: int) -> str:
    if device.error:
        return f"{device.kind} {device.index}  does not answer: {device.error}"
    size = 6 if width < _NARROW else 12
    parts = [f"{device.kind} {device.index}"]
    if device.kind == "gpu" and not device.is_simulated:
        busy = "   ?" if device.utilisation is None else f"{device.utilisation:4.0%}"
        parts.append(f"{bar(device.utilisation, size)} {busy}")
    if device.total_bytes and device.free_bytes is not None:
        used = device.total_bytes - device.free_bytes
        parts.append(f"{format_bytes(used)} of {format_bytes(device.total_bytes)}")
    if device.temperature_c is not None:
        parts.append(f"{device.temperature_c} °C")
    if device.power_w is not None:
        parts.append(f"{device.power_w:.0f} W")
    parts.append(device.name)
    return "  ".join(parts)


def _holder(pid: int, user: str | None, used: int | None, usage: Usage | None) -> str:
    words = [f"       {pid}", user or "?"]
    if used is not None:
        words.append(format_bytes(used))
    if usage is not None:
        words.append(usage.command)
    return "  ".join(words)


def _of_runs(
    runs: Mapping[str, Sequence[RankEvents]], readings: Readings, width: int, now: float
) -> Iterator[str]:
    usages = {usage.pid: usage for usage in readings.usages}
    # Those that train first, where a small window ends early.
    for ranks in sorted(runs.values(), key=lambda ranks: not any(e.is_alive for e in ranks)):
        said = verdict_on_run(ranks, now)
        yield f"{short_name(ranks[0].writer.program, width - len(said) - 2)}: {said}"
        progress = next((events.last for events in ranks if events.last), None)
        if progress is not None:
            yield "  " + _summary(ranks)
        for events in ranks:
            yield _rank(events, usages.get(events.writer.pid), width)


def _summary(ranks: Sequence[RankEvents]) -> str:
    first = next(events.last for events in ranks if events.last)
    assert first is not None
    writer = ranks[0].writer
    parts = [writer.backend, f"{writer.world_size * writer.num_replicas} replica(s)"]
    epochs = f" of {first.num_epochs}" if first.num_epochs else ""
    steps = f", step {first.step} of {first.num_steps}" if first.num_steps else ""
    parts.append(f"epoch {first.epoch}{epochs}{steps}")
    if first.samples_per_s is not None:
        parts.append(f"{first.samples_per_s:,.0f} samples/s in all")
    if first.loss is not None:
        parts.append(f"loss {first.loss:.4g}")
    return ", ".join(parts)


def _rank(events: RankEvents, usage: Usage | None, width: int) -> str:
    writer, last = events.writer, events.last
    parts = [f"  rank {writer.rank}", writer.devices]
    if last is not None and events.is_alive:
        if last.samples_per_s is not None:
            share = last.samples_per_s / (writer.world_size * writer.num_replicas)
            parts.append(f"{share:,.0f} samples/s a replica")
        if last.steps_per_s:
            parts.append(f"{1000 / last.steps_per_s:,.1f} ms a step")
        if last.input_wait is not None:
            parts.append(f"input {last.input_wait:.0%}")
    elif not events.is_alive:
        parts.append("ended")
    if usage is not None and width >= _NARROW:
        parts.append(f"{usage.cpu:.1f} cores, {format_bytes(usage.memory_bytes)}")
    return "  ".join(parts)
