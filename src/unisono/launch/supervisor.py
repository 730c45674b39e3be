"""Supervises a run until all processes have ended, or one has failed and all are ended.

Node 0's launcher decides. Failures of all nodes arrive there; it waits a moment for others, so that
the cause can be told from its consequences, and then ends the run everywhere. A process that is
stopped, silent, or keeps others waiting for longer than the timeout fails the run as well; then
every process' Python stack is shown. The launchers of other nodes report to node 0; if it is lost,
they end their processes by themselves.
"""

import abc
import signal
import time
from typing import Any

from unisono.launch.failure import Failure, Outcome, describe, first_of, outcome_of, signal_name
from unisono.launch.nodes import OtherNode, OtherNodes
from unisono.launch.processes import HEARTBEAT_S, LocalProcesses
from unisono.launch.rendezvous import RendezvousServer

_MORE_FAILURES_S = 0.3
"""How long other failures are awaited after the first that is seen, to find the cause."""
_CAUSE_S = 2.0
"""The same while only consequences were seen: the process that is gone may still be ending."""
_STACKS_S = 3.0
_END_S = 5.0
_ANSWER_S = 3.0
_OVER_S = 8.0


class Supervisor(abc.ABC):
    """What the launchers of all nodes do."""

    def __init__(self, processes: LocalProcesses) -> None:
        self._processes = processes
        self._failures: list[Failure] = []
        self._interrupts: list[int] = []
        self._last_heartbeat = 0.0

    def interrupt(self, number: int) -> None:
        """End the run because of a signal; at once if it is the second one."""
        self._interrupts.append(number)
        if len(self._interrupts) > 1:
            self._processes.signal_groups(signal.SIGKILL)

    def preempt(self) -> None:
        """Pass a preemption on to the processes."""
        self._processes.preempt()

    @abc.abstractmethod
    def supervise(self) -> Outcome:
        """Supervise the run to its end."""

    def _interruption(self) -> Failure:
        number = self._interrupts[0]
        cause = f"was told to end the run by {signal_name(number)}"
        return Failure("interrupt", cause, 128 + number, host=self._processes.host)

    def _is_heartbeat_due(self) -> bool:
        if time.monotonic() <= self._last_heartbeat + HEARTBEAT_S:
            return False
        self._last_heartbeat = time.monotonic()
        return True

    def _is_lost(self, peer: OtherNode) -> bool:
        now = time.monotonic()
        is_silent = now - peer.last_message > self._processes.silence_s
        return peer.is_gone or (is_silent and now > self._processes.excused_until)


class ChiefSupervisor(Supervisor):
    """Node 0, which decides."""

    def __init__(
        self, processes: LocalProcesses, peers: OtherNodes, server: RendezvousServer
    ) -> None:
        super().__init__(processes)
        self._peers = peers
        self._server = server
        self._first_failure = 0.0
        self._is_ending = False
        self._is_preempted = False
        self._done: set[int] = set()
        self._ended: set[int] = set()
        self._stopped: dict[int, float] = {}
        self._stacks: dict[int, str] = {}
        self._names: dict[int, str] = {}

    def supervise(self) -> Outcome:
        while True:
            self._wait()
            if not self._failures and time.monotonic() > self._processes.excused_until:
                self._check_stalls()
            if self._interrupts:
                self._add(self._interruption())
                return self._end(self._interrupts[0])
            if self._failures:
                kind = first_of(self._failures).kind
                patience_s = _CAUSE_S if kind == "echo" else _MORE_FAILURES_S
                if kind == "stall" or time.monotonic() > self._first_failure + patience_s:
                    return self._end(signal.SIGTERM)
            elif self._processes.are_done and self._done == {p.hello.node for p in self._peers}:
                self._is_preempted |= self._processes.are_preempted
                self._peers.send({"do": "over", "is_preempted": self._is_preempted})
                return outcome_of(is_preempted=self._is_preempted)

    def _wait(self) -> None:
        found = self._processes.wait(peer for peer in self._peers if not peer.is_gone)
        if not self._is_ending:  # Else it is this launcher that ends them.
            for failure in found:
                self._add(failure)
        self._send_heartbeat()
        for peer in self._peers:
            self._receive(peer)

    def _send_heartbeat(self) -> None:
        if self._is_heartbeat_due():
            self._peers.send({"do": "alive"})

    def _add(self, failure: Failure) -> None:
        if not self._failures:
            self._first_failure = time.monotonic()
        self._failures.append(failure)
        if failure.rank is not None and failure.kind != "stall":
            # Processes that wait for it need not wait any longer.
            self._server.lose(failure.rank, failure.cause)

    def _receive(self, peer: OtherNode) -> None:
        for message in peer.receive():
            getattr(self, f"_do_{message['do']}")(peer, message)
        # One whose processes have all ended without a failure may go.
        if peer.hello.node not in self._ended | self._done and self._is_lost(peer):
            self._ended.add(peer.hello.node)
            cause = f"is lost: {peer.how_lost(self._processes.silence_s)}"
            self._add(Failure("node", cause, node=peer.hello.node, host=peer.name))

    def _do_alive(self, peer: OtherNode, message: dict[str, Any]) -> None:
        ranks = {int(rank): float(s) for rank, s in message["stopped"].items()}
        others = {r: s for r, s in self._stopped.items() if not self._is_on(peer, r)}
        self._stopped = others | ranks

    def _do_failed(self, peer: OtherNode, message: dict[str, Any]) -> None:
        self._add(Failure.from_message(message["failure"]))

    def _do_done(self, peer: OtherNode, message: dict[str, Any]) -> None:
        self._done.add(peer.hello.node)
        self._is_preempted |= bool(message["is_preempted"])

    def _do_ended(self, peer: OtherNode, message: dict[str, Any]) -> None:
        self._ended.add(peer.hello.node)

    def _do_stacks(self, peer: OtherNode, message: dict[str, Any]) -> None:
        self._stacks |= {int(rank): str(text) for rank, text in message["stacks"].items()}
        self._names |= {int(rank): str(name) for rank, name in message["names"].items()}

    def _check_stalls(self) -> None:
        timeout_s = self._processes.facts.timeout_s
        waits = self._server.waits(timeout_s)
        reasons = {
            rank: f"did not come to “{topic}” within {timeout_s:g} s"
            for topic, _, missing in waits
            for rank in missing
        }
        stopped = self._stopped | self._processes.stopped()
        now = time.monotonic()
        for rank, member in self._server.members().items():
            if member.is_present and now - member.last_message >= timeout_s:
                reasons[rank] = f"has been silent for {now - member.last_message:.0f} s"
        for rank, stopped_s in stopped.items():
            if rank in reasons or stopped_s >= timeout_s:
                reasons[rank] = f"has been stopped (SIGSTOP, or Ctrl-Z) for {stopped_s:.0f} s"
        if reasons and not self._are_on_silent_nodes(list(reasons)):
            self._add_stall(reasons, waits or self._server.waits(0))

    def _are_on_silent_nodes(self, ranks: list[int]) -> bool:
        """Whether those ranks are on nodes that have sent nothing for a while themselves."""
        before = time.monotonic() - 3 * HEARTBEAT_S
        silent = [peer for peer in self._peers if peer.last_message < before]
        return all(any(self._is_on(peer, rank) for peer in silent) for rank in ranks)

    def _add_stall(
        self, reasons: dict[int, str], waits: list[tuple[str, list[int], list[int]]]
    ) -> None:
        rank = min(reasons, key=lambda rank: ("stopped" not in reasons[rank], rank))
        # Before stacks are collected, which lets stopped processes continue.
        members = self._server.members()
        notes = [f"It was at “{members[rank].doing}”." if rank in members else "It never joined."]
        notes += [f"Rank {other} {reason}." for other, reason in reasons.items() if other != rank]
        notes += [
            f"Waiting at “{topic}”: rank {', '.join(map(str, waiting))}."
            for topic, waiting, _ in waits
        ]
        doing = {each: member.doing for each, member in members.items()}
        self._collect_stacks()
        self._names |= {
            each: f"{self._names[each]}, at “{what}”"
            for each, what in doing.items()
            if each in self._names
        }
        hosts = [peer.name for peer in self._peers if self._is_on(peer, rank)]
        self._add(
            Failure(
                "stall",
                reasons[rank],
                rank=rank,
                host=(hosts or [self._processes.host])[0],
                pid=members[rank].pid if rank in members else 0,
                note=" ".join(notes),
            )
        )

    def _collect_stacks(self) -> None:
        self._peers.send({"do": "stacks"})
        self._stacks = self._processes.collect_stacks(self._send_heartbeat)
        self._names = self._processes.names()
        deadline = time.monotonic() + _STACKS_S
        num_expected = self._processes.facts.world_size
        while len(self._names) < num_expected and time.monotonic() < deadline and len(self._peers):
            self._wait()

    def _end(self, number: int) -> Outcome:
        self._is_ending = True
        self._peers.send({"do": "end", "signal": int(number)})
        self._processes.end(number, self._send_heartbeat)
        deadline = time.monotonic() + _END_S
        while self._are_others_ending() and time.monotonic() < deadline:
            self._wait()
        text = describe(self._failures, self._stacks, self._names)
        first = first_of(self._failures)
        self._peers.send({"do": "over", "failure": first.to_message(), "text": text})
        return Outcome(first.code, text, first)

    def _are_others_ending(self) -> bool:
        return any(peer.hello.node not in self._ended and not peer.is_gone for peer in self._peers)

    def _is_on(self, peer: OtherNode, rank: int) -> bool:
        before = [p.hello.num_processes for p in self._peers if p.hello.node < peer.hello.node]
        first = self._processes.facts.local_size + sum(before)
        return first <= rank < first + peer.hello.num_processes


class NodeSupervisor(Supervisor):
    """Every other node, which reports to node 0."""

    def __init__(self, processes: LocalProcesses, chief: OtherNode) -> None:
        super().__init__(processes)
        self._chief = chief
        self._deadline: float | None = None
        self._is_done_sent = False
        self._is_ended = False
        self._outcome: Outcome | None = None

    def supervise(self) -> Outcome:
        while self._outcome is None:
            self._wait()
            if self._interrupts and not self._is_ended:
                self._add(self._interruption())
                self._end(self._interrupts[0])
            if self._is_lost(self._chief):
                return self._end_alone()
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._end(signal.SIGTERM)
                if time.monotonic() > self._deadline + _OVER_S:
                    return self._end_alone()
        if not self._is_ended and not self._processes.are_done:
            self._processes.end(signal.SIGTERM, self._send_heartbeat)
        return self._outcome

    def _wait(self) -> None:
        found = self._processes.wait([] if self._chief.is_gone else [self._chief])
        if not self._is_ended:
            for failure in found:
                self._add(failure)
        self._send_heartbeat()
        if self._processes.are_done and not self._is_done_sent:
            self._is_done_sent = True
            self._chief.send({"do": "done", "is_preempted": self._processes.are_preempted})
        for message in self._chief.receive():
            getattr(self, f"_do_{message['do']}")(message)

    def _send_heartbeat(self) -> None:
        if self._is_heartbeat_due():
            self._chief.send({"do": "alive", "stopped": self._processes.stopped()})

    def _add(self, failure: Failure) -> None:
        self._failures.append(failure)
        self._chief.send({"do": "failed", "failure": failure.to_message()})
        if self._deadline is None:
            # Node 0 says when to end; if it does not, this node ends by itself.
            self._deadline = time.monotonic() + _ANSWER_S

    def _do_alive(self, message: dict[str, Any]) -> None:
        pass

    def _do_stacks(self, message: dict[str, Any]) -> None:
        stacks = self._processes.collect_stacks(self._send_heartbeat)
        self._chief.send({"do": "stacks", "stacks": stacks, "names": self._processes.names()})

    def _do_end(self, message: dict[str, Any]) -> None:
        self._end(int(message["signal"]))

    def _do_over(self, message: dict[str, Any]) -> None:
        if "failure" in message:
            first = Failure.from_message(message["failure"])
            self._outcome = Outcome(first.code, str(message["text"]), first)
        else:
            self._outcome = outcome_of(is_preempted=bool(message["is_preempted"]))

    def _end(self, number: int) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        self._processes.end(number, self._send_heartbeat)
        self._chief.send({"do": "ended"})
        self._deadline = time.monotonic()

    def _end_alone(self) -> Outcome:
        self._end(signal.SIGTERM)
        how = self._chief.how_lost(time.monotonic() - self._chief.last_message)
        lost = Failure("node", f"is lost: {how}", host=f"node 0 ({self._chief.name})")
        return Outcome(lost.code, describe([lost, *self._failures], {}, {}), lost)
