"""The service by which the JAX processes of a run find each other, in a process of its own.

JAX would put it into the first process; the end of that one, however it came, would then abort all
others on the spot, without a word on the cause. Here it outlives them: every process of the run
holds a line to it, and it ends when the last of these has ended.

Run as `python -m unisono.engines.jax_service HOST SIZE`: prints the ports of the service and of the
lines. Its standard input is the line of the process that started it.
"""

import contextlib
import selectors
import socket
import sys
from typing import Any

# JAX's own heartbeats end processes that are late. Who is late or gone is for the launcher to say.
NO_HEARTBEATS_S = 7 * 24 * 3600
_ASK_EVERY_S, _NUM_UNANSWERED = 10, 3


def main() -> None:
    host, size = sys.argv[1], int(sys.argv[2])
    service, port = _start(host, size)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=1024) as listener:
        print(port, listener.getsockname()[1], flush=True)
        _wait_for_all(listener)
    service.shutdown()


def address(host: str, port: int) -> str:
    """`host:port` as gRPC reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _start(host: str, size: int) -> tuple[Any, int]:
    from jaxlib import _jax

    # gRPC does not tell which port it took, and shares a port that another gRPC server has taken.
    # So the port is held by a socket that never listens, until gRPC has it too.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, 0))
        port = int(holder.getsockname()[1])
        service = _jax.get_distributed_runtime_service(
            address(host, port), size, heartbeat_timeout=NO_HEARTBEATS_S, shutdown_timeout=1
        )
    return service, port


def _wait_for_all(listener: socket.socket) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while len(selector.get_map()) > 1:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    selector.register(_accept(listener), selectors.EVENT_READ)
                else:
                    # Nothing is ever said on a line: something to read is its end.
                    selector.unregister(key.fileobj)


def _accept(listener: socket.socket) -> socket.socket:
    line, _ = listener.accept()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with contextlib.suppress(AttributeError, OSError):
        # A process behind a cut link says nothing when it ends.
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_EVERY_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_EVERY_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_UNANSWERED)
    return line


if __name__ == "__main__":
    main()
