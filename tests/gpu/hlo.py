"""What XLA made of a step: its collectives, read from the text of the scheduled program."""

import math
import re
from dataclasses import dataclass
from typing import Any

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_COLLECTIVE = re.compile(rf"(%?[\w.-]+) = (.*?) ({_KINDS})(-start)?\(")
_KERNEL = re.compile(r"= .*? (?:fusion|custom-call|copy|while)\(")
_SHAPE = re.compile(r"(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    kind: str
    num_bytes: int
    """Of what it returns."""
    is_async: bool
    """Whether XLA put other work between its start and its end."""
    num_overlapped: int
    """Kernels of the program between its start and its end."""


def collectives(text: str) -> list[Collective]:
    """The collectives of a program's entry, in the order in which they are started."""
    lines = _entry(text)
    found = []
    for i, line in enumerate(lines):
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        name, shapes, kind, start = match.groups()
        sizes = [_bytes(*shape.groups()) for shape in _SHAPE.finditer(shapes)]
        if start and kind != "all-reduce":
            sizes = sizes[len(sizes) // 2 :]  # Its result is (operands, results).
        is_async = bool(start) and '"is_sync":true' not in line
        between = _lines_until_done(lines[i + 1 :], name) if is_async else []
        num_overlapped = sum(_KERNEL.search(other) is not None for other in between)
        found.append(Collective(kind, sum(sizes), is_async, num_overlapped))
    return found


def asynchronous_share(found: list[Collective]) -> float:
    """The part of all bytes that are in asynchronous collectives."""
    total = sum(each.num_bytes for each in found)
    return sum(each.num_bytes for each in found if each.is_async) / total if total else 1.0


def num_kernels(text: str) -> int:
    """Instructions of the entry that run on the device, each a kernel or a few."""
    lines = _entry(text)
    return sum(bool(_KERNEL.search(line) or _COLLECTIVE.search(line)) for line in lines)


def temporary_bytes(program: Any) -> int:
    """Temporary memory on each device."""
    return int(program.memory_analysis().temp_size_in_bytes)


def _entry(text: str) -> list[str]:
    """The lines of the computation that a program starts with, in the order of its schedule."""
    return text[text.index("\nENTRY ") :].partition("\n}")[0].splitlines()


def _lines_until_done(lines: list[str], name: str) -> list[str]:
    done = re.compile(rf"-done\({re.escape(name)}[,)]")
    for i, line in enumerate(lines):
        if done.search(line):
            return lines[:i]
    raise ValueError(f"{name} is started and never ends")


def _bytes(name: str, bits: str | None, dimensions: str) -> int:
    count = math.prod(int(size) for size in dimensions.split(",") if size)
    return count * (1 if bits is None else int(bits) // 8)
