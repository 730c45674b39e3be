"""Readings and events as lines of text that fit a window; a pure function of both."""

import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence

from unisono.devices import Device, format_bytes, format_replicas
from unisono.monitor.events import RankEvents
from unisono.monitor.readings import Readings, Usage
from unisono.monitor.verdict import (
    is_quiet,
    is_stuck,
    last_record_time,
    ranks_named,
    verdict_on_devices,
    verdict_on_run,
)

_BAR = "█▉▊▋▌▍▎▏"
_NARROW = 70
_SHORTEST_NAME = 8
_NAME = 16
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
    """The view, laid out for a width; no line is longer than it where lines are truncated."""
    now = time.time() if now is None else now
    room = width if is_cut else _ROOMY
    parts = [list(_of_runs(runs, readings, room, now)), list(_of_devices(readings, width))]
    found = [*parts[1], "", *(parts[0] or ["No run of unisono is on this machine."])]
    found = [line[: width if is_cut else None].rstrip() for line in found]
    if height is not None and len(found) > height:
        more = len(found) - height + 1
        found = [*found[: height - 1], f"… {more} more lines: a taller window shows them"[:width]]
    return found


def bar(fraction: float | None, width: int) -> str:
    """A fraction as a bar.

    >>> bar(0.5, 4)
    '██  '
    """
    if fraction is None:
        return "?".ljust(width)
    filled = min(max(fraction, 0.0), 1.0) * width
    full = int(filled)
    rest = int((filled - full) * 8)
    text = _BAR[0] * full + (_BAR[8 - rest] if rest else "")
    return text.ljust(width)


def short_name(program: str, length: int) -> str:
    """A program and its arguments, truncated to a length.

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
        yield from _heading(ranks, width, now)
        if any(events.last for events in ranks):
            yield from _wrapped(_summary(ranks, now), width)
        is_same = len({events.writer.devices for events in ranks}) == 1
        held = [e.writer.rank for e in ranks if not e.is_alive or is_quiet(e, now)]
        for events in ranks:
            parts = [f"  rank {events.writer.rank}", *_doing(events, held, width, now)]
            parts += [] if is_same else [events.writer.devices]
            if (usage := usages.get(events.writer.pid)) is not None and width >= _NARROW:
                parts.append(f"{usage.cpu:.1f} cores, {format_bytes(usage.memory_bytes)}")
            yield "  ".join(parts)


def _heading(ranks: Sequence[RankEvents], width: int, now: float) -> Iterator[str]:
    """Which run it is and the sentence about it: on lines of their own where one is too short."""
    writer, said = ranks[0].writer, verdict_on_run(ranks, now)
    which = f" (pid {writer.pid}, since {_clock(writer.began, now)})"
    name = short_name(writer.program, _ROOMY)
    room = width - len(which) - len(said) - 2
    if room >= min(len(name), _NAME):
        yield f"{short_name(name, room)}{which}: {said}"
    else:
        yield f"{short_name(name, width - len(which) - 1)}{which}:"
        yield from _wrapped(said, width)


def _clock(at: float, now: float) -> str:
    then, today = time.localtime(at), time.localtime(now)
    is_today = then[:3] == today[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M", then)


def _wrapped(text: str, width: int) -> list[str]:
    wide = max(width, _NAME)
    return textwrap.wrap(text, wide, initial_indent="  ", subsequent_indent="    ")


def _summary(ranks: Sequence[RankEvents], now: float) -> str:
    newest = max((events for events in ranks if events.last), key=last_record_time)
    writer, last = ranks[0].writer, newest.last
    assert last is not None
    replicas = format_replicas(writer.world_size * writer.num_replicas)
    is_same = len({events.writer.devices for events in ranks}) == 1
    parts = [writer.backend, f"{replicas} on {writer.devices}" if is_same else replicas]
    epochs = f" of {last.num_epochs}" if last.num_epochs else ""
    steps = f", step {last.step} of {last.num_steps}" if last.num_steps else ""
    parts.append(f"epoch {last.epoch}{epochs}{steps}")
    is_well = not is_quiet(newest, now) if newest.is_alive else last.is_over
    if last.samples_per_s is not None and is_well and not last.failed_with:
        parts.append(f"{last.samples_per_s:,.0f} samples/s in all")
    if last.loss is not None:
        parts.append(f"loss {last.loss:.4g}")
    return ", ".join(parts)


def _doing(events: RankEvents, held: Sequence[int], width: int, now: float) -> list[str]:
    """What a process does now; `held` are those for which the others of its run may wait."""
    last = events.last
    if not events.is_alive:
        return [_end(events)]
    if events.is_stopped:
        return ["stopped"]
    if is_quiet(events, now):
        return [f"silent for {now - last_record_time(events):.0f} s"]
    if last is None:
        return ["starts"]
    if is_stuck(events):
        return [f"waits for {ranks_named(held)}" if held else "no step for some time"]
    return _figures(events, width)


def _end(events: RankEvents) -> str:
    last = events.last
    if last is None or not last.is_over:
        return "gone without a word"
    return f"failed with {last.failed_with}" if last.failed_with else "ended"


def _figures(events: RankEvents, width: int) -> list[str]:
    writer, last = events.writer, events.last
    assert last is not None
    of_replica, of_step = (" a replica", " a step") if width >= _NARROW else ("", "")
    parts = []
    if last.samples_per_s is not None:
        each = last.samples_per_s / (writer.world_size * writer.num_replicas)
        parts.append(f"{each:,.0f} samples/s{of_replica}")
    if last.steps_per_s:
        parts.append(f"{1000 / last.steps_per_s:,.1f} ms{of_step}")
    if last.input_wait is not None:
        parts.append(f"input {last.input_wait:.0%}")
    return parts
