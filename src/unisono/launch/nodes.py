"""The launchers of a run's nodes: they find each other, agree on ranks, and stay in contact.

Node 0's launcher listens at the coordinator's address; every other one connects to it, says how
many processes it has, and is assigned their ranks. From then on every launcher sends a message each
second, so that a node that is lost is noticed though nothing closes its connection.
"""

import contextlib
import dataclasses
import itertools
import select
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.errors import LaunchError
from unisono.launch.client import connect
from unisono.launch.network import join_address
from unisono.launch.server import Connection, Server
from unisono.launch.wire import Frames, Message, TamperedError

_SEND_S = 3.0
_POLL_S = 0.1
_CLOSE_S = 1.0
_MAX_NAMED = 16


@dataclass(frozen=True)
class Hello:
    """How a launcher introduces its node."""

    node: int
    num_nodes: int
    num_processes: int
    world_size: int | None
    """The size of the world, where one was requested."""
    host: str
    """The address at which the node's processes are reached."""
    name: str


class OtherNode:
    """Another node's launcher."""

    def __init__(self, frames: Frames, hello: Hello) -> None:
        self.hello = hello
        self.last_message = time.monotonic()
        self.is_gone = False
        self._why_gone = ""
        self._frames = frames
        frames.socket.settimeout(_SEND_S)

    @property
    def name(self) -> str:
        return self.hello.name

    def how_lost(self, silence_s: float) -> str:
        """Why the node counts as lost, after so long a silence or because it is gone."""
        return self._why_gone if self.is_gone else f"no message for {silence_s:.0f} s"

    def fileno(self) -> int:
        return self._frames.fileno()

    def send(self, message: Message) -> None:
        # That it is gone is noticed where its messages are read.
        if not self.is_gone:
            with contextlib.suppress(OSError):
                self._frames.send(message)

    def receive(self) -> list[Message]:
        """The messages that have arrived; the peer is gone once none can arrive any more."""
        messages: list[Message] = []
        while not self.is_gone and select.select([self], [], [], 0)[0]:
            try:
                messages += self._frames.receive_available()
                self.last_message = time.monotonic()
            except TamperedError as error:
                self._disconnect(str(error))
            except (EOFError, OSError):
                self._disconnect()
            except Exception as error:
                self._disconnect(f"its message is malformed ({error!r})")
        return messages

    def close(self) -> None:
        """Close, after the other end has read the last message: closing at once may destroy it."""
        with contextlib.suppress(OSError):
            self._frames.socket.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + _CLOSE_S
        while not self.is_gone and time.monotonic() < deadline:
            self.receive()
            time.sleep(0.01)
        self._disconnect()

    def _disconnect(self, why: str = "its launcher is gone") -> None:
        if not self.is_gone:
            self._why_gone = why
        self.is_gone = True
        self._frames.close()


class OtherNodes:
    """The launchers that this one is connected to: node 0's to all others, those to node 0's."""

    def __init__(self, peers: Iterable[OtherNode] = ()) -> None:
        self._peers = list(peers)

    def __iter__(self) -> Iterator[OtherNode]:
        return iter(self._peers)

    def __len__(self) -> int:
        return len(self._peers)

    def send(self, message: Message) -> None:
        for peer in self._peers:
            peer.send(message)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


class NodeServer:
    """Node 0's side: collects the other launchers, and refuses those that do not fit."""

    def __init__(self, own: Hello, ports: Sequence[int], secret: str) -> None:
        """Listens at the first of the ports that is free."""
        self._own = own
        self._peers: dict[int, OtherNode] = {}
        self._is_complete = False
        self._server = self._listen(ports, secret)
        self._lock = self._server.lock
        self._server.start()

    def gather(self, timeout_s: float) -> list[OtherNode]:
        """All other nodes' launchers, in order; LaunchError where some do not connect."""
        deadline = time.monotonic() + timeout_s
        while len(self._present()) < self._own.num_nodes - 1:
            if time.monotonic() > deadline:
                raise self._give_up(f"within {timeout_s:g} s")
            time.sleep(_POLL_S)
        with self._lock:
            self._is_complete = True
            peers = [self._peers[node] for node in sorted(self._peers)]
        _check_sizes([self._own, *(peer.hello for peer in peers)], peers)
        return peers

    def close(self) -> None:
        self._server.close()

    def _listen(self, ports: Sequence[int], secret: str) -> Server:
        host = self._own.host
        for port in ports:
            try:
                return Server(
                    secret, host=host, port=port, name="unisono-nodes", on_message=self._welcome
                )
            except OSError as error:
                reason = error
        places = " or ".join(join_address(host, port) for port in ports)
        raise LaunchError(
            f"Cannot listen at {places}, the coordinator's address: {reason}. Is another run "
            "there? Choose another port, the same on all nodes: --coordinator host:port."
        ) from reason

    def _present(self) -> dict[int, OtherNode]:
        with self._lock:
            for node, peer in list(self._peers.items()):
                peer.receive()
                if peer.is_gone:  # It may connect again.
                    del self._peers[node]
            return dict(self._peers)

    def _give_up(self, when: str) -> LaunchError:
        with self._lock:
            peers = dict(self._peers)
        here = {0, *peers}
        absent = (str(node) for node in range(self._own.num_nodes) if node not in here)
        missing = list(itertools.islice(absent, _MAX_NAMED))
        if (num_more := self._own.num_nodes - len(here) - len(missing)) > 0:
            missing.append(f"and {num_more} more")
        reason = (
            f"Of {self._own.num_nodes} nodes, {', '.join(missing)} did not connect to the "
            f"coordinator {when}. Start the same command on every node, with --node-rank from 0 to "
            f"{self._own.num_nodes - 1} and this coordinator, and check that no firewall blocks it."
        )
        for peer in peers.values():
            peer.send({"do": "refuse", "reason": reason})
        return LaunchError(reason)

    def _welcome(self, connection: Connection, message: Message) -> None:
        hello = Hello(**message)
        reason = self._refusal(hello)
        if reason is None:
            connection.admit()
            self._peers[hello.node] = OtherNode(self._server.detach(connection), hello)
        else:
            connection.send({"do": "refuse", "reason": reason})

    def _refusal(self, hello: Hello) -> str | None:
        own = self._own
        if hello.num_nodes != own.num_nodes:
            return (
                f"Node {hello.node} ({hello.name}) was started with --nodes {hello.num_nodes}, "
                f"node 0 ({own.name}) with --nodes {own.num_nodes}. Start all with the same."
            )
        if not 0 < hello.node < own.num_nodes:
            return _outside(hello)
        if hello.node in self._peers:
            return _twice(hello, self._peers[hello.node].hello)
        return "The run has begun without this node." if self._is_complete else None


def connect_to_node_0(
    coordinator: str, secret: str, hello: Hello, timeout_s: float
) -> tuple[OtherNode, Any]:
    """The other nodes' side: node 0's launcher, and its welcome once all have connected."""
    deadline = time.monotonic() + timeout_s
    frames = connect(coordinator, secret, timeout_s)
    frames.send(dataclasses.asdict(hello))
    peer = OtherNode(frames, Hello(0, hello.num_nodes, 0, None, coordinator, coordinator))
    while time.monotonic() < deadline + _SEND_S and not peer.is_gone:
        for message in peer.receive():
            if message.get("do") == "welcome":
                peer.hello = Hello(**message["host"])
                return peer, message
            if message.get("do") == "refuse":
                peer.close()
                raise LaunchError(str(message["reason"]))
            if "dropped" in message:
                peer.close()
                raise LaunchError(f"Node 0's launcher closed the connection: {message['dropped']}.")
        time.sleep(_POLL_S)
    reason = (
        f"is lost: {peer.how_lost(timeout_s)}"
        if peer.is_gone
        else f"did not begin in {timeout_s:g} s"
    )
    peer.close()
    raise LaunchError(f"The launcher of node 0 at {coordinator} {reason}. See what it printed.")


def _check_sizes(hellos: Sequence[Hello], peers: Sequence[OtherNode]) -> None:
    total = sum(hello.num_processes for hello in hellos)
    for hello in hellos:
        if hello.world_size not in (None, total):
            counts = ", ".join(f"{each.name}: {each.num_processes}" for each in hellos)
            reason = (
                f"Node {hello.node} ({hello.name}) was started for a world of {hello.world_size} "
                f"processes; the nodes have {total} ({counts}). Give every node the same numbers."
            )
            for peer in peers:
                peer.send({"do": "refuse", "reason": reason})
            raise LaunchError(reason)


def _twice(hello: Hello, other: Hello) -> str:
    return (
        f"Node rank {hello.node} was given twice: to {other.name} and to {hello.name}. Give every "
        f"node its own, from 0 to {other.num_nodes - 1}."
    )


def _outside(hello: Hello) -> str:
    return (
        f"Node rank {hello.node} is outside of this run, whose nodes are 0 to "
        f"{hello.num_nodes - 1}."
    )
