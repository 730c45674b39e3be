"""The meeting point of a run: one small server that its processes talk to, and no tensor passes.

It runs in the launcher, or in the first process where somebody else's launcher started them. It
lets in who proves the run's secret, checks that ranks and sizes agree, keeps the values by which
engines find each other, and lets processes meet (see points.py). It listens on one address only.
"""

import base64
import contextlib
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unisono.launch.points import Answers, Points
from unisono.launch.wire import Frames, Message, challenge, is_proof, proof

_TICK_S = 0.5
_STRANGER_S = 10.0


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


class Caller:
    """One connection, as the server sees it."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.frames = Frames(sock)
        self.address = address
        self.challenge = challenge()
        self.since = time.monotonic()
        self.role = ""
        self.rank = -1
        self.last_word = self.since

    def send(self, message: Message) -> None:
        # One that does not read any more is found by its silence.
        with contextlib.suppress(OSError):
            self.frames.send(message)


class Meeting:
    """Serves a run of `size` processes from a thread of its own.

    `on_node(caller, message)` is called, on that thread, with what callers of the role "node" (the
    launchers of other nodes) say, and with None when one is gone.
    """

    def __init__(
        self,
        size: int,
        secret: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float | None = None,
        on_node: Callable[[Caller, Message | None], None] | None = None,
    ) -> None:
        """`timeout_s`: how long processes wait for one that does not come, before it is an error
        of all; None where a launcher watches for that.
        """
        self.size = size
        self.seed = secrets.randbelow(2**31)
        self._secret = secret
        self._timeout_s = timeout_s
        self._on_node = on_node
        self._listener = socket.create_server((host, port), family=_family(host), backlog=1024)
        self.host, self.port = self._listener.getsockname()[:2]
        self._lock = threading.RLock()
        self._callers: dict[int, Caller] = {}
        self._members: dict[int, Member] = {}
        self._by_rank: dict[int, Caller] = {}
        self._points = Points(size)
        self._values: dict[str, str] = {}
        self._waiting_for: list[tuple[Caller, str, float]] = []
        self._is_open = True
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="unisono-meeting", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

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
        self._is_open = False
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _TICK_S)
        with self._lock:
            for caller in list(self._callers.values()):
                self._drop(caller)
            self._listener.close()

    # -- the server's thread -------------------------------------------------------------------

    def _serve(self) -> None:
        while self._is_open:
            for key, _ in self._selector.select(_TICK_S):
                with self._lock:
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._read(key.data)
            with self._lock:
                self._look_at_clock()

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError:
            return
        sock.settimeout(_STRANGER_S)
        caller = Caller(sock, str(address[0]))
        self._callers[sock.fileno()] = caller
        self._selector.register(sock, selectors.EVENT_READ, caller)
        caller.send({"challenge": caller.challenge})

    def _read(self, caller: Caller) -> None:
        try:
            messages = caller.frames.receive_available()
        except (EOFError, OSError):
            self._drop(caller)
            return
        caller.last_word = time.monotonic()
        for message in messages:
            try:
                self._handle(caller, message)
            except (KeyError, TypeError, ValueError, AttributeError):
                self._drop(caller)  # Not the language of this meeting.
                return

    def _handle(self, caller: Caller, message: Message) -> None:
        if not caller.frames.is_trusted:
            self._check_proof(caller, message)
        elif not caller.role:
            self._welcome(caller, message)
        elif caller.role == "node":
            if self._on_node is not None:
                self._on_node(caller, message)
        else:
            self._members[caller.rank].last_word = caller.last_word
            getattr(self, f"_do_{message['do']}")(caller, message)

    def _check_proof(self, caller: Caller, message: Message) -> None:
        theirs = str(message.get("challenge"))
        found = message.get("proof")
        if not is_proof(found, self._secret, "caller", caller.challenge, theirs):
            caller.send({"error": "secret"})
            self._drop(caller)
            return
        caller.frames.is_trusted = True
        caller.send({"proof": proof(self._secret, "host", theirs, caller.challenge)})

    def _welcome(self, caller: Caller, message: Message) -> None:
        role = str(message["role"])
        if role == "node":
            caller.role = role
            if self._on_node is not None:
                self._on_node(caller, message)
            return
        rank, size = int(message["rank"]), int(message["size"])
        refusal = self._refusal(rank, size, caller)
        if refusal is not None:
            caller.send({"error": refusal})
            return
        caller.role, caller.rank = "rank", rank
        self._by_rank[rank] = caller
        self._members[rank] = Member(
            rank, int(message["pid"]), str(message["host"]), "starting", caller.last_word
        )
        caller.send({"seed": self.seed})

    def _refusal(self, rank: int, size: int, caller: Caller) -> str | None:
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

    def _drop(self, caller: Caller) -> None:
        file = caller.frames.fileno()
        if self._callers.pop(file, None) is None:
            return
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(caller.frames.socket)
        caller.frames.close()
        if caller.role == "node" and self._on_node is not None:
            self._on_node(caller, None)
        if caller.role == "rank" and not self._members[caller.rank].has_left:
            self._members[caller.rank].is_lost = True
            self._tell(self._points.depart(caller.rank, "is gone", is_lost=True))

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        for caller in list(self._callers.values()):
            if not caller.role and now - caller.since > _STRANGER_S:
                self._drop(caller)
        for waiting in list(self._waiting_for):
            caller, key, deadline = waiting
            if now > deadline:
                self._waiting_for.remove(waiting)
                caller.send({"error": f"nobody has set {key!r}", "is_late": True})
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
        for rank, answer in answers:
            if rank in self._by_rank:
                self._by_rank[rank].send(answer)

    # -- what a rank can say -------------------------------------------------------------------

    def _do_exchange(self, caller: Caller, message: Message) -> None:
        self._come(caller, message)

    def _do_follow(self, caller: Caller, message: Message) -> None:
        self._come(caller, message)

    def _come(self, caller: Caller, message: Message) -> None:
        self._members[caller.rank].doing = str(message["topic"])
        answers = self._points.arrive(
            caller.rank,
            message["do"],
            message["topic"],
            message["value"],
            time.monotonic(),
            message.get("ranks"),
        )
        self._tell(answers)

    def _do_announce(self, caller: Caller, message: Message) -> None:
        self._tell(self._points.announce(message["topic"], message["said"]))

    def _do_listen(self, caller: Caller, message: Message) -> None:
        self._tell(self._points.listen(caller.rank, message["topic"]))

    def _do_put(self, caller: Caller, message: Message) -> None:
        self._keep(message["key"], message["value"])
        caller.send({})

    def _do_get(self, caller: Caller, message: Message) -> None:
        key = message["key"]
        if key in self._values:
            caller.send({"value": self._values[key]})
        else:
            deadline = time.monotonic() + float(message["timeout_s"])
            self._waiting_for.append((caller, key, deadline))

    def _do_add(self, caller: Caller, message: Message) -> None:
        key = message["key"]
        before = base64.b64decode(self._values[key]) if key in self._values else b"0"
        total = int(before) + int(message["amount"])
        self._keep(key, base64.b64encode(str(total).encode()).decode())
        caller.send({"value": total})

    def _keep(self, key: str, value: str) -> None:
        self._values[key] = value
        for waiting in [waiting for waiting in self._waiting_for if waiting[1] == key]:
            self._waiting_for.remove(waiting)
            waiting[0].send({"value": value})

    def _do_alive(self, caller: Caller, message: Message) -> None:
        self._members[caller.rank].doing = str(message["doing"])

    def _do_leave(self, caller: Caller, message: Message) -> None:
        member = self._members[caller.rank]
        member.has_left = True
        member.doing = "ended"
        self._tell(self._points.depart(caller.rank, "has ended its program", is_lost=False))
        caller.send({})


def _family(host: str) -> Any:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
