"""This process' connection to the rendezvous server of its run: collectives of small values.

Joined when unisono is imported, before a framework can start. Tensors never travel here; backends
use it to find each other, and to agree on what they are about to do, so that a difference between
processes is an error that names it and never a collective that hangs.
"""

import atexit
import base64
import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from unisono.errors import DisagreementError, LaunchError, PeerLostError
from unisono.launch.wire import Frames, Message, TamperedError, greet
from unisono.topology import Topology

HOST = "UNISONO_HOST"
_HEARTBEAT_S = 1.0
_GET_TIMEOUT_S = 300.0
_RETRY_S = 0.2
_TRY_S = 10.0


class World:
    """The processes of a run, seen from one of them."""

    def __init__(self, topology: Topology, secret: str, *, start_timeout_s: float) -> None:
        assert topology.coordinator is not None
        self.topology = topology
        self.rank = topology.rank
        self.size = topology.world_size
        self.is_chief = topology.is_chief
        self._pid = os.getpid()
        self._doing = "starting"
        self.num_points = 0
        """How many collectives of all processes were called: the same everywhere at the same place
        of the program."""
        self.waited_s = 0.0
        """How long this process has waited for others, in all."""
        self.is_preempting = False
        """Whether all processes know, at the same step, that the run is being preempted."""
        self._asking = threading.Lock()
        self._sending = threading.Lock()
        self._is_left = False
        self._is_unanswered = False
        """Whether an interrupt has ended the wait for an answer, which may still come."""
        self._frames = connect(topology.coordinator, secret, start_timeout_s)
        self.host = os.environ.get(HOST) or self._frames.socket.getsockname()[0]
        """The address at which other processes reach this one."""
        me: Message = {"rank": self.rank, "size": self.size, "pid": self._pid, "host": self.host}
        self._frames.socket.settimeout(start_timeout_s)
        try:
            answer = self._ask(me)
        except PeerLostError as error:
            if not isinstance(error.__cause__, TimeoutError):
                raise
            raise LaunchError(
                f"The rendezvous server admitted rank {self.rank}, and then did not answer for "
                f"{start_timeout_s:g} s. Check the first node, and the network between."
            ) from error.__cause__
        self._frames.socket.settimeout(None)
        if "error" in answer:
            raise LaunchError(str(answer["error"]))
        self.seed = int(answer["seed"])
        """One number drawn for the run, the same in all processes."""
        threading.Thread(
            target=self._send_heartbeats, name="unisono-heartbeat", daemon=True
        ).start()
        atexit.register(self.leave)

    @property
    def is_ours(self) -> bool:
        """Whether this process joined itself: a fork of it is no member of the run."""
        return os.getpid() == self._pid

    def all_gather(self, topic: str, value: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Every process' value, in rank order, once all have called it with this topic.

        DisagreementError in all of them when one calls something else, or ends.
        """
        values: list[Any] = self._collective("all_gather", topic, value, ranks)
        return values

    def broadcast(self, topic: str, value: Any) -> Any:
        """The chief's value, in every process."""
        return self._collective("broadcast", topic, value if self.is_chief else None, None)

    def announce(self, topic: str, **said: Any) -> None:
        """The chief has done what `wait_for_chief` waits for; `said` is sent to those that wait."""
        self._send({"do": "announce", "topic": topic, "said": said})

    def wait_for_chief(self, topic: str) -> Message | None:
        """Wait until the chief has announced a topic; None if it went on without doing so."""
        said: Message | None = _value(self._ask({"do": "listen", "topic": topic}))
        return said

    def put(self, key: str, value: bytes) -> None:
        """Store a value for other processes."""
        self._ask({"do": "put", "key": key, "value": base64.b64encode(value).decode()})

    def get(self, key: str, timeout_s: float = _GET_TIMEOUT_S) -> bytes:
        """A value that another process has stored, waiting for it; TimeoutError after a while."""
        answer = self._ask({"do": "get", "key": key, "timeout_s": timeout_s})
        if "error" in answer:
            raise TimeoutError(f"{answer['error']} within {timeout_s:g} s")
        return base64.b64decode(answer["value"])

    def add(self, key: str, amount: int) -> int:
        """Add to a number on the server; returns the sum."""
        return int(self._ask({"do": "add", "key": key, "amount": amount})["value"])

    def leave(self) -> None:
        """Tell the server that this process calls no further collectives."""
        if self._is_left or not self.is_ours:
            return
        self._is_left = True
        # A request of another thread may be under way for ever: the program ends all the same.
        if self._asking.acquire(timeout=1.0):
            self._asking.release()
            with contextlib.suppress(PeerLostError, OSError):
                self._frames.socket.settimeout(2.0)
                self._ask({"do": "leave"})

    def abandon(self) -> None:
        """Do not say goodbye, after a failure: then the others see this process as lost."""
        self._is_left = True

    def _collective(self, kind: str, topic: str, value: Any, ranks: Sequence[int] | None) -> Any:
        members = None if ranks is None else list(ranks)
        self._doing = topic
        if ranks is None:
            self.num_points += 1
        start = time.perf_counter()
        answer = self._ask({"do": kind, "topic": topic, "value": value, "ranks": members})
        self.waited_s += time.perf_counter() - start
        return _value(answer)

    def _ask(self, message: Message) -> Message:
        with self._asking:
            try:
                if self._is_unanswered:
                    self._discard_answers()
                self._is_unanswered = True
                self._send(message)
                answer = self._frames.receive()
                self._is_unanswered = False
            except TamperedError as error:
                self._frames.close()
                raise LaunchError(
                    f"Rank {self.rank} read from the rendezvous server: {error}. Something between "
                    "the hosts changes what they send: check proxies, and who else is on this "
                    "network."
                ) from error
            except (EOFError, OSError) as error:
                raise PeerLostError(
                    "The rendezvous server is gone, and with it most likely the launcher or the "
                    f"first node: {error or 'the connection was closed'}."
                ) from error
        if "dropped" in answer:
            raise LaunchError(
                f"The rendezvous server closed rank {self.rank}'s connection: {answer['dropped']}."
            )
        return answer

    def _discard_answers(self) -> None:
        """Read the answers to earlier requests; else one would be taken for the next answer."""
        self._send({"do": "withdraw"})
        while not self._frames.receive().get("withdrawn"):
            pass

    def _send(self, message: Message) -> None:
        with self._sending:
            self._frames.send(message)

    def _send_heartbeats(self) -> None:
        while not self._is_left:
            try:
                self._send({"do": "alive", "doing": self._doing})
            except OSError:
                return
            time.sleep(_HEARTBEAT_S)


def _value(answer: Message) -> Any:
    """The value of an answer; raises the error that it holds."""
    if "error" not in answer:
        return answer["value"]
    if answer.get("is_lost"):
        raise PeerLostError(str(answer["error"]))
    raise DisagreementError(str(answer["error"]))


def connect(coordinator: str, secret: str, timeout_s: float) -> Frames:
    """An authenticated connection to a server, which may not be there yet, or be busy."""
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(0.1, deadline - time.monotonic())
        try:
            return greet_at(host.strip("[]"), int(port), secret, min(left_s, _TRY_S))
        except (EOFError, OSError) as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"No answer from the rendezvous server at {coordinator} within "
                    f"{timeout_s:g} s: {error or 'it closed the connection'}. Check that the first "
                    "node was started, that the address is its own, and that no firewall blocks it."
                ) from error
            time.sleep(_RETRY_S)


def greet_at(host: str, port: int, secret: str, timeout_s: float) -> Frames:
    """An authenticated connection to an address; errors as of `greet`."""
    sock = socket.create_connection((host, port), timeout=timeout_s)
    try:
        return greet(sock, secret, timeout_s)
    except BaseException:
        sock.close()
        raise


_world: World | None = None


def current_world() -> World | None:
    """The run that this process belongs to; None where it is alone."""
    return _world if _world is not None and _world.is_ours else None


def enter(world: World) -> None:
    """Make a world that of this process."""
    global _world
    _world = world
