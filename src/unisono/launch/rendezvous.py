"""The meeting point of a run: one small server that its processes talk to, and no tensor passes.

It runs in the launcher, or in the first process where somebody else's launcher started them. It
lets in who proves the run's secret (see server.py), checks that ranks and sizes agree, keeps the
values by which engines find each other, and lets processes meet (see points.py). It listens on one
address only.
"""

import base64
import secrets
import time
from dataclasses import dataclass

from unisono.launch.network import join_address
from unisono.launch.rendezvous_state import Answers, Points
from unisono.launch.server import Connection, Server
from unisono.launch.wire import Message, encode


@dataclass
class Member:
    """What is known of one process of the run."""

    rank: int
    pid: int
    host: str
    doing: str
    last_word: float
    has_left: bool = False
    is_lost: bool = False

    @property
    def is_present(self) -> bool:
        return not self.has_left and not self.is_lost


class Meeting:
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
        """`timeout_s`: how long processes wait for one that does not come, before it is an error
        of all; None where a launcher watches for that.
        """
        self.size = size
        self.seed = secrets.randbelow(2**31)
        self._timeout_s = timeout_s
        self._members: dict[int, Member] = {}
        self._ranks: dict[Connection, int] = {}
        self._by_rank: dict[int, Connection] = {}
        self._points = Points(size)
        self._values: dict[str, str] = {}
        self._waiting_for: list[tuple[Connection, str, float]] = []
        self._server = Server(
            secret,
            host=host,
            port=port,
            name="unisono-meeting",
            on_message=self._handle,
            on_end=self._part,
            on_tick=self._look_at_clock,
        )
        self._lock = self._server.lock
        self.host, self.port = self._server.host, self._server.port
        self._server.start()

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)

    def members(self) -> dict[int, Member]:
        """The processes that have come so far, by rank."""
        with self._lock:
            return dict(self._members)

    def waits(self, longer_than_s: float) -> list[tuple[str, list[int], list[int]]]:
        """Topics at which ranks have waited so long, with who waits and who is missing."""
        with self._lock:
            points = self._points.waited_at(time.monotonic() - longer_than_s)
            return [(p.topic, sorted(p.waiting), p.missing) for p in points]

    def lose(self, rank: int, how: str) -> None:
        """Tell everybody that a process is lost, as its launcher has seen."""
        with self._lock:
            member = self._members.get(rank)
            if member is not None:
                member.is_lost = True
            self._tell(self._points.depart(rank, how, is_lost=True))

    def close(self) -> None:
        self._server.close()

    # -- the server's thread -------------------------------------------------------------------

    def _handle(self, caller: Connection, message: Message) -> None:
        rank = self._ranks.get(caller)
        if rank is None:
            self._welcome(caller, message)
        else:
            self._members[rank].last_word = time.monotonic()
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
                f"Rank {rank} is here already (process {other.pid} on {other.host}). Give every "
                "process a rank of its own: two nodes may have been started with one node rank."
            )
        return None

    def _part(self, caller: Connection, how: str) -> None:
        rank = self._ranks.pop(caller, None)
        if rank is not None and not self._members[rank].has_left:
            self._members[rank].is_lost = True
            self._tell(self._points.depart(rank, how, is_lost=True))

    def _look_at_clock(self, now: float) -> None:
        for waiting in list(self._waiting_for):
            caller, key, deadline = waiting
            if now > deadline:
                self._waiting_for.remove(waiting)
                caller.send(_not_set(key))
        if self._timeout_s is not None:
            for point in self._points.waited_at(now - self._timeout_s):
                self._tell(self._points.give_up(point, self._overdue(point.missing, point.topic)))

    def _overdue(self, missing: list[int], topic: str) -> str:
        doing = [
            f"rank {rank} ({self._members[rank].doing if rank in self._members else 'not here'})"
            for rank in missing
        ]
        return (
            f"Waited {self._timeout_s:g} s at “{topic}” for {', '.join(doing)}. Raise "
            "UNISONO_TIMEOUT if that is to be expected."
        )

    def _tell(self, answers: Answers) -> None:
        encoded: dict[int, bytes] = {}  # Many are told the same.
        for rank, answer in answers:
            if rank in self._by_rank:
                if id(answer) not in encoded:
                    encoded[id(answer)] = _encoded(answer)
                self._by_rank[rank].send_encoded(encoded[id(answer)])

    def _answer(self, rank: int, answer: Message) -> None:
        self._by_rank[rank].send(answer)

    # -- what a rank can say -------------------------------------------------------------------

    def _do_exchange(self, rank: int, message: Message) -> None:
        self._come(rank, message)

    def _do_follow(self, rank: int, message: Message) -> None:
        self._come(rank, message)

    def _come(self, rank: int, message: Message) -> None:
        self._members[rank].doing = str(message["topic"])
        answers = self._points.arrive(
            rank,
            message["do"],
            message["topic"],
            message["value"],
            time.monotonic(),
            message.get("ranks"),
        )
        self._tell(answers)

    def _do_announce(self, rank: int, message: Message) -> None:
        self._tell(self._points.announce(message["topic"], message["said"]))

    def _do_listen(self, rank: int, message: Message) -> None:
        self._tell(self._points.listen(rank, message["topic"]))

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
        """Its program interrupted it: what it asked for before this is not to be answered later."""
        self._points.withdraw(rank)
        own = self._by_rank[rank]
        self._waiting_for = [each for each in self._waiting_for if each[0] is not own]
        self._answer(rank, {"withdrawn": True})

    def _do_alive(self, rank: int, message: Message) -> None:
        self._members[rank].doing = str(message["doing"])

    def _do_leave(self, rank: int, message: Message) -> None:
        member = self._members[rank]
        member.has_left = True
        member.doing = "ended"
        self._tell(self._points.depart(rank, "has ended its program", is_lost=False))
        self._answer(rank, {})


def _encoded(answer: Message) -> bytes:
    """An answer as it is sent; where it cannot be, all that wait for it must learn that."""
    try:
        return encode(answer)
    except Exception as error:
        return encode({"error": f"What the processes exchanged cannot be sent back: {error!r}."})


def _not_set(key: str) -> Message:
    return {"error": f"nobody has set {key!r}", "is_late": True}
