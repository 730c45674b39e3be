"""Which ranks have reached which collective of a run, and their answers: plain state, no sockets.

The processes of a run reach the same collectives in the same order, each with a topic and a value.
An `all_gather` ends when all have reached it and gives every value to each; a `broadcast` gives the
first rank's value. Different topics, a process that will never arrive, and a deadlock between
collectives of different groups are errors in all processes at once: none is left waiting.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Answer = dict[str, Any]
Answers = list[tuple[int, Answer]]

_ADVICE = (
    "Every process must make the same calls, in the same order and with the same data: fit and "
    "strategy.distribute_dataset take each process' shard of it. Work for one process alone "
    "belongs under `if unisono.topology().is_chief:` and may not train or evaluate; a callback "
    "that is given to fit as unisono.callbacks.chief_only(callback) may call evaluate and predict."
)


@dataclass
class PendingCollective:
    """One collective call, in progress."""

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

    def awaited(self) -> list[int]:
        """The ranks that the answer depends on."""
        return [rank for rank in self.missing if self.kind != "broadcast" or rank == self.ranks[0]]


class RendezvousState:
    """All collectives in progress of a run of `size` processes."""

    def __init__(self, size: int) -> None:
        self._everyone = tuple(range(size))
        self._open: dict[tuple[tuple[int, ...], int], PendingCollective] = {}
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
        """A process reaches its next collective; the answers to send."""
        members = self._everyone if ranks is None else tuple(ranks)
        number = self._counts[rank, members] = self._counts.get((rank, members), 0) + 1
        key = (members, number)
        if key not in self._open:
            self._open[key] = PendingCollective(members, kind, topic, rank, now)
        call = self._open[key]
        call.values[rank] = value
        call.waiting.add(rank)
        if (kind, topic) != (call.kind, call.topic):
            self._fail(call, _different(call, rank, topic), is_lost=False)
        for missing in call.missing:
            if missing in self._gone:
                self._fail(call, *self._absence(missing, call))
        answers = self._answers(call)
        if not call.missing:
            del self._open[key]
        return answers + self._answers_to_deadlock(call) + self._answers_to_listeners()

    def depart(self, rank: int, how: str, *, is_lost: bool) -> Answers:
        """A process will reach no further collective: it has ended (`how` says it) or is lost."""
        self._gone[rank] = (how, is_lost)
        answers: Answers = []
        for call in self._open.values():
            if rank in call.missing:
                self._fail(call, *self._absence(rank, call))
                answers += self._answers(call)
        return answers + self._answers_to_listeners()

    def announce(self, topic: str, said: Answer) -> Answers:
        """The chief has done what others wait for, with this result."""
        self._announced.setdefault(topic, []).append(said)
        return self._answers_to_listeners()

    def listen(self, rank: int, topic: str) -> Answers:
        """A process waits for the chief's announcement, or for it to be past it."""
        self._heard[rank, topic] = self._heard.get((rank, topic), 0) + 1
        self._listening[rank] = topic
        return self._answers_to_listeners()

    def withdraw(self, rank: int) -> None:
        """A process no longer waits for an answer; that it has arrived stands."""
        for call in self._open.values():
            call.waiting.discard(rank)
        self._listening.pop(rank, None)

    def waited_at(self, before: float) -> list[PendingCollective]:
        """Collectives at which a process has waited since before a time."""
        return [p for p in self._open.values() if p.waiting and p.since < before]

    def give_up(self, call: PendingCollective, reason: str) -> Answers:
        """End a collective with an error."""
        self._fail(call, reason, is_lost=False)
        return self._answers(call)

    def _fail(self, call: PendingCollective, reason: str, is_lost: bool) -> None:
        if call.error is None:
            call.error = {"error": reason, "is_lost": is_lost}

    def _answers(self, call: PendingCollective) -> Answers:
        if call.error is not None:
            answer = call.error
        elif call.kind == "broadcast" and call.ranks[0] in call.values:
            answer = {"value": call.values[call.ranks[0]]}
        elif not call.missing:
            answer = {"value": [call.values[rank] for rank in call.ranks]}
        else:
            return []
        answers = [(rank, answer) for rank in sorted(call.waiting)]
        call.waiting.clear()
        return answers

    def _answers_to_deadlock(self, call: PendingCollective) -> Answers:
        """Errors where processes wait for each other in a cycle: a deadlock."""
        cycle = self._cycle([(call, -1)])
        if not cycle:
            return []
        steps = [f"rank {rank} waits at “{each.topic}”" for each, rank in cycle]
        reason = (
            f"Processes of this run wait for each other: {', '.join(steps)}, and each of them is "
            f"awaited by another. {_ADVICE}"
        )
        for each, _ in cycle:
            self._fail(each, reason, is_lost=False)
        return [answer for each, _ in cycle for answer in self._answers(each)]

    def _cycle(
        self, path: list[tuple[PendingCollective, int]]
    ) -> list[tuple[PendingCollective, int]]:
        """The cycle from the first collective of a path back to it, with who waits for the next."""
        waiting = {rank: p for p in self._open.values() for rank in p.waiting}
        for rank in path[-1][0].awaited():
            other = waiting.get(rank)
            if other is None:
                continue
            if other is path[0][0]:
                return [(other, rank), *path[1:]]
            if all(other is not call for call, _ in path):
                found = self._cycle([*path, (other, rank)])
                if found:
                    return found
        return []

    def _answers_to_listeners(self) -> Answers:
        answers: Answers = []
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
            answers.append((rank, answer))
        return answers

    def _is_chief_past(self, rank: int) -> bool:
        chief, own = (self._counts.get((r, self._everyone), 0) for r in (0, rank))
        return chief > own or 0 in self._gone

    def _absence(self, rank: int, call: PendingCollective) -> tuple[str, bool]:
        how, is_lost = self._gone[rank]
        others = sorted(r for r in call.values if r != rank)
        reason = f"Rank {rank} {how}, while {_named(others)} at “{call.topic}”."
        return (reason if is_lost else f"{reason} {_ADVICE}"), is_lost


def _different(call: PendingCollective, rank: int, topic: str) -> str:
    return (
        f"Processes of this run disagree: rank {call.first} came to “{call.topic}”, rank {rank} "
        f"to “{topic}”. {_ADVICE}"
    )


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits for it"
    return f"ranks {', '.join(map(str, ranks))} wait for it"
