"""Who has come to which point of a run, and what they are told: plain state, no sockets.

The processes of a run come to the same points in the same order, each with a topic and a value.
An `exchange` ends when all have come and gives every value to each; a `follow` gives the first
rank's value. Different topics, a process that will never come, and processes that wait for each
other at points of different groups are answered to all at once: nobody is left waiting.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Answer = dict[str, Any]
Answers = list[tuple[int, Answer]]

_ADVICE = (
    "Every process must make the same calls, in the same order and with the same data: fit and "
    "strategy.distribute_dataset take each process' share of it. Work for one process alone "
    "belongs under `if unisono.topology().is_chief:` and may not train or evaluate; a callback "
    "that is given to fit as unisono.callbacks.chief_only(callback) may call evaluate and predict."
)


@dataclass
class Point:
    """One place where processes meet."""

    ranks: tuple[int, ...]
    kind: str
    topic: str
    first: int
    since: float
    values: dict[int, Any] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    error: Answer | None = None

    @property
    def missing(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.values]

    def is_waited_at(self) -> bool:
        return bool(self.waiting)

    def awaited(self) -> list[int]:
        """Those without whom nobody here is answered."""
        return [rank for rank in self.missing if self.kind != "follow" or rank == self.ranks[0]]


class Points:
    """All open points of a run of `size` processes."""

    def __init__(self, size: int) -> None:
        self._everyone = tuple(range(size))
        self._open: dict[tuple[tuple[int, ...], int], Point] = {}
        self._counts: dict[tuple[int, tuple[int, ...]], int] = {}
        self._gone: dict[int, tuple[str, bool]] = {}
        self._announced: dict[str, list[Answer]] = {}
        self._heard: dict[tuple[int, str], int] = {}
        self._listening: dict[int, str] = {}

    def arrive(
        self,
        rank: int,
        kind: str,
        topic: str,
        value: Any,
        now: float,
        ranks: Sequence[int] | None = None,
    ) -> Answers:
        """A process comes to its next point; who is to be told what."""
        members = self._everyone if ranks is None else tuple(ranks)
        number = self._counts[rank, members] = self._counts.get((rank, members), 0) + 1
        key = (members, number)
        if key not in self._open:
            self._open[key] = Point(members, kind, topic, rank, now)
        point = self._open[key]
        point.values[rank] = value
        point.waiting.add(rank)
        if (kind, topic) != (point.kind, point.topic):
            self._fail(point, _different(point, rank, topic), is_lost=False)
        for missing in point.missing:
            if missing in self._gone:
                self._fail(point, *self._absence(missing, point))
        answers = self._answers(point)
        if not point.missing:
            del self._open[key]
        return answers + self._answers_of_circle(point) + self._answers_of_listeners()

    def depart(self, rank: int, how: str, *, is_lost: bool) -> Answers:
        """A process will come to no further point: it has ended (`how` says it) or is lost."""
        self._gone[rank] = (how, is_lost)
        answers: Answers = []
        for point in self._open.values():
            if rank in point.missing:
                self._fail(point, *self._absence(rank, point))
                answers += self._answers(point)
        return answers + self._answers_of_listeners()

    def announce(self, topic: str, said: Answer) -> Answers:
        """The chief has done what others wait for, and says how it went."""
        self._announced.setdefault(topic, []).append(said)
        return self._answers_of_listeners()

    def listen(self, rank: int, topic: str) -> Answers:
        """A process waits for the chief's announcement, or for it to be past it."""
        self._heard[rank, topic] = self._heard.get((rank, topic), 0) + 1
        self._listening[rank] = topic
        return self._answers_of_listeners()

    def withdraw(self, rank: int) -> None:
        """A process no longer waits for an answer; it still has come to where it came."""
        for point in self._open.values():
            point.waiting.discard(rank)
        self._listening.pop(rank, None)

    def waited_at(self, before: float) -> list[Point]:
        """Points at which a process has waited since before a time."""
        return [p for p in self._open.values() if p.is_waited_at() and p.since < before]

    def give_up(self, point: Point, reason: str) -> Answers:
        """End the waiting at a point with a reason."""
        self._fail(point, reason, is_lost=False)
        return self._answers(point)

    def _fail(self, point: Point, reason: str, is_lost: bool) -> None:
        if point.error is None:
            point.error = {"error": reason, "is_lost": is_lost}

    def _answers(self, point: Point) -> Answers:
        if point.error is not None:
            answer = point.error
        elif point.kind == "follow" and point.ranks[0] in point.values:
            answer = {"value": point.values[point.ranks[0]]}
        elif not point.missing:
            answer = {"value": [point.values[rank] for rank in point.ranks]}
        else:
            return []
        told = [(rank, answer) for rank in sorted(point.waiting)]
        point.waiting.clear()
        return told

    def _answers_of_circle(self, point: Point) -> Answers:
        """Processes that wait for each other at different points will do so for ever."""
        circle = self._circle([(point, -1)])
        if not circle:
            return []
        steps = [f"rank {rank} waits at “{each.topic}”" for each, rank in circle]
        reason = (
            f"Processes of this run wait for each other: {', '.join(steps)}, and each of them is "
            f"awaited at the point of another. {_ADVICE}"
        )
        for each, _ in circle:
            self._fail(each, reason, is_lost=False)
        return [answer for each, _ in circle for answer in self._answers(each)]

    def _circle(self, path: list[tuple[Point, int]]) -> list[tuple[Point, int]]:
        """Points from the first of a path back to it, with who waits there for the next."""
        waiting = {rank: p for p in self._open.values() for rank in p.waiting}
        for rank in path[-1][0].awaited():
            other = waiting.get(rank)
            if other is None:
                continue
            if other is path[0][0]:
                return [(other, rank), *path[1:]]
            if all(other is not point for point, _ in path):
                found = self._circle([*path, (other, rank)])
                if found:
                    return found
        return []

    def _answers_of_listeners(self) -> Answers:
        told: Answers = []
        for rank, topic in list(self._listening.items()):
            announced, number = self._announced.get(topic, []), self._heard[rank, topic]
            if len(announced) >= number:
                answer: Answer = {"value": announced[number - 1]}
            elif self._gone.get(0, ("", False))[1]:
                how = f"Rank 0 {self._gone[0][0]}, while rank {rank} waits for it at “{topic}”."
                answer = {"error": how, "is_lost": True}
            elif self._is_chief_past(rank):
                answer = {"value": None}
            else:
                continue
            del self._listening[rank]
            told.append((rank, answer))
        return told

    def _is_chief_past(self, rank: int) -> bool:
        chief, own = (self._counts.get((r, self._everyone), 0) for r in (0, rank))
        return chief > own or 0 in self._gone

    def _absence(self, rank: int, point: Point) -> tuple[str, bool]:
        how, is_lost = self._gone[rank]
        others = sorted(r for r in point.values if r != rank)
        reason = f"Rank {rank} {how}, while {_named(others)} at “{point.topic}”."
        return (reason if is_lost else f"{reason} {_ADVICE}"), is_lost


def _different(point: Point, rank: int, topic: str) -> str:
    return (
        f"Processes of this run disagree: rank {point.first} came to “{point.topic}”, rank {rank} "
        f"to “{topic}”. {_ADVICE}"
    )


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits for it"
    return f"ranks {', '.join(map(str, ranks))} wait for it"
