"""Conducts a run from node 0: until all have ended, or one has failed and all are ended.

Failures of all nodes come together here, are waited for a moment so that the first can be told
from its echoes, and end the run everywhere. So does a process that is stopped, silent, or keeps
others waiting for longer than the time-out; then every process' Python stack is shown.
"""

import signal
import time
from typing import Any

from unisono.launch.failure import Failure, Outcome, describe, ended_well, first_of, signal_name
from unisono.launch.nodes import Peer, Peers
from unisono.launch.process_watch import AFTERMATH_S, BEAT_S, ECHO_S, Watch
from unisono.launch.rendezvous import Meeting

_STACKS_S = 3.0
_END_S = 5.0


class Conductor:
    """Node 0's part; the other nodes' launchers follow (see follow.py)."""

    def __init__(self, watch: Watch, peers: Peers, meeting: Meeting) -> None:
        self._watch = watch
        self._peers = peers
        self._meeting = meeting
        self._failures: list[Failure] = []
        self._first_seen = 0.0
        self._interrupted: list[int] = []
        self._is_ending = False
        self._has_made_room = False
        self._last_beat = 0.0
        self._done: set[int] = set()
        self._ended: set[int] = set()
        self._stopped: dict[int, float] = {}
        self._stacks: dict[int, str] = {}
        self._names: dict[int, str] = {}

    def interrupt(self, number: int) -> None:
        """End the run, as the user or the system asks by a signal; asked twice, at once."""
        self._interrupted.append(number)
        if len(self._interrupted) > 1:
            self._watch.ranks.signal_groups(signal.SIGKILL)

    def warn(self) -> None:
        """Pass on that the run must soon make room."""
        self._watch.warn()

    def conduct(self) -> Outcome:
        """See the run to its end."""
        while True:
            self._go_on()
            if not self._failures and time.monotonic() > self._watch.pardon_until:
                self._look_for_stalls()
            if self._interrupted:
                number = self._interrupted[0]
                cause = f"was told to end the run by {signal_name(number)}"
                self._note(Failure("interrupt", cause, 128 + number, host=self._watch.host))
                return self._end(number)
            if self._failures:
                kind = first_of(self._failures).kind
                patience_s = ECHO_S if kind == "echo" else AFTERMATH_S
                if kind == "stall" or time.monotonic() > self._first_seen + patience_s:
                    return self._end(signal.SIGTERM)
            elif self._watch.is_done and self._done == {peer.hello.node for peer in self._peers}:
                self._has_made_room |= self._watch.has_made_room
                self._peers.tell({"do": "over", "has_made_room": self._has_made_room})
                return ended_well(self._has_made_room)

    def _go_on(self) -> None:
        found = self._watch.wait(peer for peer in self._peers if not peer.is_gone)
        if not self._is_ending:  # Then it is us who end them.
            for failure in found:
                self._note(failure)
        self._beat()
        for peer in self._peers:
            self._hear(peer)

    def _beat(self) -> None:
        if time.monotonic() > self._last_beat + BEAT_S:
            self._last_beat = time.monotonic()
            self._peers.tell({"do": "alive"})

    def _note(self, failure: Failure) -> None:
        if not self._failures:
            self._first_seen = time.monotonic()
        self._failures.append(failure)
        if failure.rank is not None and failure.kind != "stall":
            # Who waits for it need not wait any longer.
            self._meeting.lose(failure.rank, failure.cause)

    def _hear(self, peer: Peer) -> None:
        for message in peer.receive():
            getattr(self, f"_do_{message['do']}")(peer, message)
        is_silent = time.monotonic() - peer.last_word > self._watch.silence_s
        is_blamed = time.monotonic() > self._watch.pardon_until
        # One whose processes have all ended well may go.
        is_expected = peer.hello.node not in self._ended | self._done
        if is_expected and (peer.is_gone or (is_silent and is_blamed)):
            self._lose(peer)

    def _lose(self, peer: Peer) -> None:
        self._ended.add(peer.hello.node)
        cause = f"is lost: {peer.how_lost}"
        if not peer.is_gone:
            cause = f"is lost: nothing was heard of it for {self._watch.silence_s:g} s"
        self._note(Failure("node", cause, node=peer.hello.node, host=peer.name))

    def _do_alive(self, peer: Peer, message: dict[str, Any]) -> None:
        ranks = {int(rank): float(s) for rank, s in message["stopped"].items()}
        others = {r: s for r, s in self._stopped.items() if not self._is_on(peer, r)}
        self._stopped = others | ranks

    def _do_failed(self, peer: Peer, message: dict[str, Any]) -> None:
        self._note(Failure.from_message(message["failure"]))

    def _do_done(self, peer: Peer, message: dict[str, Any]) -> None:
        self._done.add(peer.hello.node)
        self._has_made_room |= bool(message["has_made_room"])

    def _do_ended(self, peer: Peer, message: dict[str, Any]) -> None:
        self._ended.add(peer.hello.node)

    def _do_stacks(self, peer: Peer, message: dict[str, Any]) -> None:
        self._stacks |= {int(rank): str(text) for rank, text in message["stacks"].items()}
        self._names |= {int(rank): str(name) for rank, name in message["names"].items()}

    def _look_for_stalls(self) -> None:
        timeout_s = self._watch.facts.timeout_s
        waits = self._meeting.waits(timeout_s)
        reasons = {
            rank: f"did not come to “{topic}” within {timeout_s:g} s"
            for topic, _, missing in waits
            for rank in missing
        }
        stopped = self._stopped | self._watch.stopped()
        now = time.monotonic()
        for rank, member in self._meeting.members().items():
            if member.is_present and now - member.last_word >= timeout_s:
                reasons[rank] = f"has been silent for {now - member.last_word:.0f} s"
        for rank, stopped_s in stopped.items():
            if rank in reasons or stopped_s >= timeout_s:
                reasons[rank] = f"has been stopped (SIGSTOP, or Ctrl-Z) for {stopped_s:.0f} s"
        if reasons and not self._is_explained(list(reasons)):
            self._note_stall(reasons, waits or self._meeting.waits(0))

    def _is_explained(self, ranks: list[int]) -> bool:
        """Whether those ranks are on nodes that have said nothing for a while themselves."""
        quiet = [p for p in self._peers if time.monotonic() - p.last_word > 3 * BEAT_S]
        return all(any(self._is_on(peer, rank) for peer in quiet) for rank in ranks)

    def _note_stall(
        self, reasons: dict[int, str], waits: list[tuple[str, list[int], list[int]]]
    ) -> None:
        rank = min(reasons, key=lambda rank: ("stopped" not in reasons[rank], rank))
        # As it is now: who is asked for its stack goes on.
        doing = {member.rank: member.doing for member in self._meeting.members().values()}
        pids = {member.rank: member.pid for member in self._meeting.members().values()}
        notes = [f"It was at “{doing[rank]}”." if rank in doing else "It never joined."]
        notes += [f"Rank {other} {reason}." for other, reason in reasons.items() if other != rank]
        notes += [
            f"Waiting at “{topic}”: rank {', '.join(map(str, waiting))}."
            for topic, waiting, _ in waits
        ]
        self._collect_stacks()
        for each, what in doing.items():
            if each in self._names:
                self._names[each] += f", at “{what}”"
        self._note(
            Failure(
                "stall",
                reasons[rank],
                rank=rank,
                host=self._host_of(rank),
                pid=pids.get(rank, 0),
                note=" ".join(notes),
            )
        )

    def _collect_stacks(self) -> None:
        self._peers.tell({"do": "stacks"})
        self._stacks, self._names = self._watch.stacks(self._beat)
        deadline = time.monotonic() + _STACKS_S
        num_expected = self._watch.facts.world_size
        while len(self._names) < num_expected and time.monotonic() < deadline and len(self._peers):
            self._go_on()

    def _end(self, number: int) -> Outcome:
        self._is_ending = True
        self._peers.tell({"do": "end", "signal": int(number)})
        self._watch.end(number, self._beat)
        deadline = time.monotonic() + _END_S
        while self._are_others_ending() and time.monotonic() < deadline:
            self._go_on()
        text = describe(self._failures, self._stacks, self._names)
        first = first_of(self._failures)
        self._peers.tell({"do": "over", "failure": first.to_message(), "text": text})
        return Outcome(first.code, text, first)

    def _are_others_ending(self) -> bool:
        return any(peer.hello.node not in self._ended and not peer.is_gone for peer in self._peers)

    def _is_on(self, peer: Peer, rank: int) -> bool:
        first = self._first_rank(peer)
        return first <= rank < first + peer.hello.num_processes

    def _first_rank(self, peer: Peer) -> int:
        before = [p.hello.num_processes for p in self._peers if p.hello.node < peer.hello.node]
        return self._watch.facts.local_size + sum(before)

    def _host_of(self, rank: int) -> str:
        names = [peer.name for peer in self._peers if self._is_on(peer, rank)]
        return names[0] if names else self._watch.host
