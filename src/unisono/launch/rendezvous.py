"""The rendezvous server of a run: its processes join it and synchronize; no tensors pass through.

It runs in the launcher, or in rank 0 where another launcher started the processes. It admits
clients that prove the run's secret (see server.py), checks that ranks and sizes agree, stores the
values by which backends find each other, and answers the collectives of small Python values (see
rendezvous_state.py). It listens on one address only.
"""

import base64
import secrets
import time
from dataclasses import dataclass

from unisono.launch.network import join_address
from unisono.launch.rendezvous_state import Answers, RendezvousState
from unisono.launch.server import Connection, Server
from unisono.launch.wire import Message, encode


@dataclass
class Member:
    """What is known of one process of the run."""

    rank: int
    pid: int
    host: str
    doing: str
    last_message: float
    has_left: bool = False
    is_lost: bool = False

    @property
    def is_present(self) -> bool:
        return not self.has_left and not self.is_lost


class RendezvousServer:
    """Serves a run of `size` processes from a thread of its own."""

    def __init__(
        self,
        size: int,
        secret: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        """`timeout_s`: how long processes wait for a late one, before all of them raise; None where
        a launcher watches for that.
        """
        self.size = size
        self.seed = secrets.randbelow(2**31)
        self._timeout_s = timeout_s
        self._members: dict[int, Member] = {}
        self._ranks: dict[Connection, int] = {}
        self._by_rank: dict[int, Connection] = {}
        self._state = RendezvousState(size)
        self._values: dict[str, str] = {}
        self._waiting_for: list[tuple[Connection, str, float]] = []
        self._server = Server(
            secret,
            host=host,
            port=port,
            name="unisono-rendezvous",
            on_message=self._handle,
            on_end=self._disconnect,
            on_tick=self._check_timeouts,
        )
        self._lock = self._server.lock
        self.host, self.port = self._server.host, self._server.port
        self._server.start()

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)

    def members(self) -> dict[int, Member]:
        """The processes that have joined so far, by rank."""
        with self._lock:
            return dict(self._members)

    def waits(self, longer_than_s: float) -> list[tuple[str, list[int], list[int]]]:
        """Topics at which ranks have waited so long, the ranks that wait, and those missing."""
        with self._lock:
            found = self._state.waited_at(time.monotonic() - longer_than_s)
            return [(each.topic, sorted(each.waiting), each.missing) for each in found]

    def lose(self, rank: int, how: str) -> None:
        """Mark a process as lost, as its launcher has seen; who waits for it gets an error."""
        with self._lock:
            member = self._members.get(rank)
            if member is not None:
                member.is_lost = True
            self._send(self._state.depart(rank, how, is_lost=True))

    def close(self) -> None:
        self._server.close()

    # -- the server's thread -------------------------------------------------------------------

    def _handle(self, caller: Connection, message: Message) -> None:
        rank = self._ranks.get(caller)
        if rank is None:
            self._welcome(caller, message)
        else:
            self._members[rank].last_message = time.monotonic()
            getattr(self, f"_do_{message['do']}")(rank, message)

    def _welcome(self, caller: Connection, message: Message) -> None:
        rank, size = int(message["rank"]), int(message["size"])
        refusal = self._refusal(rank, size, caller)
        if refusal is not None:
            caller.send({"error": refusal})
            return
        member = Member(
            rank, int(message["pid"]), str(message["host"]), "starting", time.monotonic()
        )
        caller.admit()
        self._ranks[caller] = rank
        self._by_rank[rank] = caller
        self._members[rank] = member
        caller.send({"seed": self.seed})

    def _refusal(self, rank: int, size: int, caller: Connection) -> str | None:
        if size != self.size:
            return (
                f"Rank {rank} at {caller.address} belongs to a world of {size} processes; this "
                f"run has {self.size}. Start every node with the same numbers of nodes and "
                "processes."
            )
        if not 0 <= rank < self.size:
            return f"Rank {rank} is outside of this run, whose ranks are 0 to {self.size - 1}."
        if rank in self._members:
            other = self._members[rank]
            return (
                f"Rank {rank} has joined already (process {other.pid} on {other.host}). Give every "
                "process a rank of its own: two nodes may have been started with one node rank."
            )
        return None

    def _disconnect(self, caller: Connection, how: str) -> None:
        rank = self._ranks.pop(caller, None)
        if rank is not None and not self._members[rank].has_left:
            self._members[rank].is_lost = True
            self._send(self._state.depart(rank, how, is_lost=True))

    def _check_timeouts(self, now: float) -> None:
        for waiting in list(self._waiting_for):
            caller, key, deadline = waiting
            if now > deadline:
                self._waiting_for.remove(waiting)
                caller.send(_not_set(key))
        if self._timeout_s is not None:
            for each in self._state.waited_at(now - self._timeout_s):
                self._send(self._state.give_up(each, self._overdue(each.missing, each.topic)))

    def _overdue(self, missing: list[int], topic: str) -> str:
        doing = [
            f"rank {rank} ({self._members[rank].doing if rank in self._members else 'not joined'})"
            for rank in missing
        ]
        return (
            f"Waited {self._timeout_s:g} s at “{topic}” for {', '.join(doing)}. Raise "
            "UNISONO_TIMEOUT if that is expected."
        )

    def _send(self, answers: Answers) -> None:
        encoded: dict[int, bytes] = {}  # Many get the same answer.
        for rank, answer in answers:
            if rank in self._by_rank:
                if id(answer) not in encoded:
                    encoded[id(answer)] = _encoded(answer)
                self._by_rank[rank].send_encoded(encoded[id(answer)])

    def _answer(self, rank: int, answer: Message) -> None:
        self._by_rank[rank].send(answer)

    # -- messages of a rank --------------------------------------------------------------------

    def _do_all_gather(self, rank: int, message: Message) -> None:
        self._arrive(rank, message)

    def _do_broadcast(self, rank: int, message: Message) -> None:
        self._arrive(rank, message)

    def _arrive(self, rank: int, message: Message) -> None:
        self._members[rank].doing = str(message["topic"])
        answers = self._state.arrive(
            rank,
            message["do"],
            message["topic"],
            message["value"],
            time.monotonic(),
            message.get("ranks"),
        )
        self._send(answers)

    def _do_announce(self, rank: int, message: Message) -> None:
        self._send(self._state.announce(message["topic"], message["said"]))

    def _do_listen(self, rank: int, message: Message) -> None:
        self._send(self._state.listen(rank, message["topic"]))

    def _do_put(self, rank: int, message: Message) -> None:
        self._keep(message["key"], message["value"])
        self._answer(rank, {})

    def _do_get(self, rank: int, message: Message) -> None:
        key, timeout_s = message["key"], float(message["timeout_s"])
        if key in self._values:
            self._answer(rank, {"value": self._values[key]})
        elif timeout_s > 0:
            self._waiting_for.append((self._by_rank[rank], key, time.monotonic() + timeout_s))
        else:
            self._answer(rank, _not_set(key))

    def _do_add(self, rank: int, message: Message) -> None:
        key = message["key"]
        before = base64.b64decode(self._values[key]) if key in self._values else b"0"
        total = int(before) + int(message["amount"])
        self._keep(key, base64.b64encode(str(total).encode()).decode())
        self._answer(rank, {"value": total})

    def _keep(self, key: str, value: str) -> None:
        self._values[key] = value
        for waiting in [waiting for waiting in self._waiting_for if waiting[1] == key]:
            self._waiting_for.remove(waiting)
            waiting[0].send({"value": value})

    def _do_withdraw(self, rank: int, message: Message) -> None:
        """The program interrupted a request: it must not be answered later."""
        self._state.withdraw(rank)
        own = self._by_rank[rank]
        self._waiting_for = [each for each in self._waiting_for if each[0] is not own]
        self._answer(rank, {"withdrawn": True})

    def _do_alive(self, rank: int, message: Message) -> None:
        self._members[rank].doing = str(message["doing"])

    def _do_leave(self, rank: int, message: Message) -> None:
        member = self._members[rank]
        member.has_left = True
        member.doing = "ended"
        self._send(self._state.depart(rank, "has ended its program", is_lost=False))
        self._answer(rank, {})


def _encoded(answer: Message) -> bytes:
    """An answer as it is sent; where it cannot be, an error for all that wait for it."""
    try:
        return encode(answer)
    except Exception as error:
        return encode({"error": f"The gathered values cannot be sent back: {error!r}."})


def _not_set(key: str) -> Message:
    return {"error": f"nobody has set {key!r}", "is_late": True}
