"""JAX's coordination service for the processes of a run, in a process of its own.

JAX would run it in the first process, whose end, for whatever reason, would abort all others at
once and without naming the cause. Here it outlives them: each process of the run keeps a connection
to it open, authenticated by a token, and it ends when the last of these has ended.

Run as `python -m unisono.backends.jax.coordination_service HOST SIZE [SOURCE ...]`, with the token
as the first line of its standard input, which stays open as the connection of the process that
started it. Prints the ports of the service and of the connections. Only loopback and the sources
reach them; JAX's service itself does not authenticate callers.
"""

import contextlib
import os
import resource
import socket
import sys
import threading
from typing import Any

from unisono.backends.jax.internals import start_coordination_service
from unisono.launch.client import connect
from unisono.launch.network import join_address
from unisono.launch.server import Connection, Server
from unisono.launch.source_filter import OnlyFrom
from unisono.launch.wire import Message

_KEEPALIVE_EVERY_S, _NUM_UNANSWERED = 10, 3


def main() -> None:
    host, size, *sources = sys.argv[1:]
    token = _read_token()
    _allow_many_connections()
    service, port = _start(host, int(size), sources)
    processes = _Processes()
    with OnlyFrom(sources, host=host):
        server = Server(
            token,
            host=host,
            port=0,
            name="unisono-jax-service",
            on_message=processes.on_message,
            on_end=processes.on_end,
        )
    server.start()
    print(port, server.port, flush=True)
    while os.read(sys.stdin.fileno(), 1):
        pass
    processes.wait_for_end()
    service.shutdown()


def hold_connection(host: str, port: int, token: str, timeout_s: float) -> None:
    """Keep the service alive as long as this process lives.

    Raises:
        LaunchError: There was no answer in time.
    """
    frames = connect(join_address(host, port), token, timeout_s)
    frames.send({})
    frames.socket.settimeout(timeout_s)
    frames.receive()
    # Left for the system to close: the service has to outlive what Python does at exit.
    frames.socket.detach()


class _Processes:
    """The processes of the run that hold a connection."""

    def __init__(self) -> None:
        self._connections: set[Connection] = set()
        self._changed = threading.Condition()

    def on_message(self, connection: Connection, message: Message) -> None:
        with self._changed:
            self._connections.add(connection)
        with contextlib.suppress(AttributeError, OSError):
            # A process behind a cut link sends nothing when it ends.
            sock, tcp = connection.socket, socket.IPPROTO_TCP
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(tcp, socket.TCP_KEEPIDLE, _KEEPALIVE_EVERY_S)
            sock.setsockopt(tcp, socket.TCP_KEEPINTVL, _KEEPALIVE_EVERY_S)
            sock.setsockopt(tcp, socket.TCP_KEEPCNT, _NUM_UNANSWERED)
        connection.admit()
        connection.send({})

    def on_end(self, connection: Connection, how: str) -> None:
        with self._changed:
            self._connections.discard(connection)
            self._changed.notify_all()

    def wait_for_end(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._connections)


def _read_token() -> str:
    token = b""
    # Byte by byte: what a buffered reader has read ahead could not be waited for.
    while byte := os.read(sys.stdin.fileno(), 1):
        if byte == b"\n":
            return token.decode()
        token += byte
    raise SystemExit("The process that started this service has ended.")


def _allow_many_connections() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _start(host: str, size: int, sources: list[str]) -> tuple[Any, int]:
    # gRPC does not report which port it took, and shares a port with another gRPC server. So the
    # port is held by a socket that never listens, until gRPC has it too.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, 0))
        port = int(holder.getsockname()[1])
        with OnlyFrom(sources, host=host, port=port):
            service = start_coordination_service(join_address(host, port), size)
    return service, port


if __name__ == "__main__":
    main()
