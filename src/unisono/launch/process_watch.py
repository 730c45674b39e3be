"""A node's processes as its launcher sees them: who failed and how, who is stopped, who is done."""

import select
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

from unisono.devices.cpu import num_memory_kills
from unisono.launch.failure import (
    Failure,
    cause_of_code,
    cause_of_report,
    last_words,
    name_of,
    without_ours,
)
from unisono.launch.plan import Facts
from unisono.launch.preemption_signal import WARNING
from unisono.launch.processes import Rank, Ranks

TICK_S = 0.2
BEAT_S = 1.0
MOST_SILENCE_S = 30.0
AFTERMATH_S = 0.3
"""How long other failures are waited for after the first that is seen, to find the cause."""
ECHO_S = 2.0
"""The same while only echoes were seen: a process that is gone for others may still be ending."""

_TERM_S = 2.0  # A process of JAX does not end when it is asked to.


class Watch:
    """The processes of this node."""

    def __init__(self, ranks: Ranks, facts: Facts, host: str, interrupt_s: float) -> None:
        self.ranks = ranks
        self.facts = facts
        self.host = host
        self._interrupt_s = interrupt_s
        self.silence_s = min(facts.timeout_s, MOST_SILENCE_S)
        """How long another node may say nothing."""
        self._memory_kills = num_memory_kills()
        self._failed: set[int] = set()
        self._is_one_missed = False
        self._last_look = time.monotonic()
        self.pardon_until = 0.0
        """Until then nobody is blamed for being late: this process was stopped itself."""

    def wait(self, others: Iterable[Any] = ()) -> list[Failure]:
        """A short while, less if something happens; then who has failed since the last time."""
        files = [rank for rank in self.ranks if rank.is_alive and rank.is_line_open]
        select.select([*files, *others], [], [], TICK_S)
        now = time.monotonic()
        if now - self._last_look > self.silence_s / 2:
            self.pardon_until = now + 2 * BEAT_S
        self._last_look = now
        self.ranks.look()
        found = self._failures(self._has_failed)
        self._is_one_missed |= any(failure.kind == "echo" for failure in found)
        if self._is_one_missed:
            found = [*self._failures(self._has_vanished), *found]
        return found

    @property
    def is_done(self) -> bool:
        return all(
            rank.code == 0 or (rank.code is not None and rank.has_made_room) for rank in self.ranks
        )

    @property
    def has_made_room(self) -> bool:
        return any(rank.has_made_room for rank in self.ranks)

    def warn(self) -> None:
        """Tell the processes that they must soon make room."""
        self.ranks.signal(WARNING)

    def stopped(self) -> dict[int, float]:
        """The ranks that somebody has stopped, and for how long."""
        now = time.monotonic()
        return {
            rank.rank: now - rank.stopped_since
            for rank in self.ranks
            if rank.is_alive and rank.stopped_since is not None
        }

    def stacks(self, meanwhile: Callable[[], None]) -> tuple[dict[int, str], dict[int, str]]:
        """Every process' stacks, and what each process is called; calls `meanwhile` often."""
        names = {rank.rank: name_of(rank.rank, self.host, rank.pid) for rank in self.ranks}
        return self.ranks.collect_stacks(meanwhile), names

    def end(self, number: int, meanwhile: Callable[[], None]) -> None:
        """End all processes here: ask by a signal, then kill; this calls `meanwhile` often."""
        patience_s = self._interrupt_s if number == signal.SIGINT else _TERM_S
        self.ranks.end(number, patience_s, meanwhile)

    def _has_failed(self, rank: Rank) -> bool:
        if rank.rank in self._failed or rank.has_made_room:
            return False
        told = rank.report is not None and rank.report["kind"] != "ended"
        return told or bool(rank.code)

    def _has_vanished(self, rank: Rank) -> bool:
        """Whether a process ended without a word, which is no failure until others miss it."""
        return rank.rank not in self._failed and rank.code == 0 and rank.report is None

    def _failures(self, is_meant: Callable[[Rank], bool]) -> list[Failure]:
        ranks = [rank for rank in self.ranks if is_meant(rank)]
        if ranks:  # What they printed before may still be on its way.
            self.ranks.output.catch_up()
        return [self._failure(rank) for rank in ranks]

    def _failure(self, rank: Rank) -> Failure:
        self._failed.add(rank.rank)
        told = rank.report if rank.report is not None and rank.report["kind"] != "ended" else None
        if told is not None:
            kind, cause, code = cause_of_report(told)
            traceback = str(told["traceback"])
        else:
            assert rank.code is not None
            kind, cause, code = cause_of_code(rank.code, self._memory_kills)
            traceback = without_ours(rank.stacks()) if rank.stacks() else ""
        return Failure(
            kind,
            cause,
            code,
            rank.rank,
            self.facts.node,
            self.host,
            rank.pid,
            traceback,
            last_words(self.ranks.output.last_output(rank.rank), traceback),
            self.ranks.output.log_of(rank.rank),
        )
