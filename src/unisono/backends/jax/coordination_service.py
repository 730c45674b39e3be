"""The service by which the JAX processes of a run find each other, in a process of its own.

JAX would put it into the first process; the end of that one, however it came, would then abort all
others on the spot, without a word on the cause. Here it outlives them: every process of the run
holds a line to it, and it ends when the last of these has ended. Lines of strangers don't count: a
process of the run says the token that the service was given, and hears that it was understood.

Run as `python -m unisono.backends.jax.coordination_service HOST SIZE [SOURCE ...]`, with
the token as the first line of its standard input, which is then the line of the process that
started it: prints the ports of the service and of the lines. Only loopback and the sources reach
them; the service itself authenticates nobody.
"""

import contextlib
import hmac
import os
import resource
import selectors
import socket
import sys
import time
from typing import Any

from unisono.launch.source_filter import OnlyFrom, answer_only

# JAX's own heartbeats end processes that are late. Who is late or gone is for the launcher to say.
NO_HEARTBEATS_S = 7 * 24 * 3600
_ASK_EVERY_S, _NUM_UNANSWERED = 10, 3
_STRANGER_S = 5.0
_NUM_STRANGERS = 64
_BACKLOG = 1024
_ACCEPT_AGAIN_S = 0.1
_UNDERSTOOD = b"+"


def main() -> None:
    host, size, *sources = sys.argv[1:]
    token = _read_token()
    _allow_many_lines()
    service, port = _start(host, int(size), sources)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        answer_only(listener, sources)
        listener.listen(_BACKLOG)
        print(port, listener.getsockname()[1], flush=True)
        _Lines(listener, token).wait_for_all()
    service.shutdown()


def address(host: str, port: int) -> str:
    """`host:port` as gRPC reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def hold_line(host: str, port: int, token: str, timeout_s: float) -> None:
    """Keep the service alive as long as this process lives; OSError where it does not answer."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(ConnectionError):  # Crowded out by strangers, perhaps.
            line = socket.create_connection((host, port), timeout_s)
            line.sendall(token.encode())
            if line.recv(1) == _UNDERSTOOD:
                # Left for the system to close: the service has to outlast what Python tidies up.
                line.detach()
                return
            line.close()
        if time.monotonic() > deadline:
            raise TimeoutError(f"it took no line within {timeout_s:g} s")
        time.sleep(_ACCEPT_AGAIN_S)


def _read_token() -> bytes:
    token = b""
    # One byte after the other: what is read ahead could not be waited for.
    while byte := os.read(sys.stdin.fileno(), 1):
        if byte == b"\n":
            return token
        token += byte
    raise SystemExit("The process that started this service has ended.")


def _allow_many_lines() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _start(host: str, size: int, sources: list[str]) -> tuple[Any, int]:
    from jaxlib import _jax

    # gRPC does not tell which port it took, and shares a port that another gRPC server has taken.
    # So the port is held by a socket that never listens, until gRPC has it too.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, 0))
        port = int(holder.getsockname()[1])
        with OnlyFrom(sources, host=host, port=port):
            service = _jax.get_distributed_runtime_service(
                address(host, port), size, heartbeat_timeout=NO_HEARTBEATS_S, shutdown_timeout=1
            )
    return service, port


class _Lines:
    """Who holds a line, and strangers, who are given a few seconds and little room."""

    def __init__(self, listener: socket.socket, token: bytes) -> None:
        self._listener = listener
        self._token = token
        self._num_held = 1  # Standard input.
        self._strangers: dict[socket.socket, tuple[float, bytes]] = {}

    def wait_for_all(self) -> None:
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(sys.stdin, selectors.EVENT_READ)
            while self._num_held:
                for key, _ in self._selector.select(_STRANGER_S if self._strangers else None):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._strangers:
                        self._listen_to(key.fileobj)
                    else:
                        # Nothing is said on a line any more: something to read is its end.
                        self._selector.unregister(key.fileobj)
                        self._num_held -= 1
                self._part_with_strangers()

    def _accept(self) -> None:
        try:
            line, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            time.sleep(_ACCEPT_AGAIN_S)  # No descriptor is left; the caller waits in the queue.
            return
        line.setblocking(False)
        self._strangers[line] = (time.monotonic(), b"")
        self._selector.register(line, selectors.EVENT_READ)

    def _listen_to(self, line: socket.socket) -> None:
        since, before = self._strangers[line]
        try:
            data = line.recv(len(self._token) - len(before))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        said = before + data
        if data and len(said) < len(self._token):
            # Not compared yet: who heard of a wrong part could guess the token digit by digit.
            self._strangers[line] = (since, said)
        elif not hmac.compare_digest(said, self._token):
            self._drop(line)
        else:
            del self._strangers[line]
            self._num_held += 1
            _keep(line)
            with contextlib.suppress(OSError):  # Already gone: its end is read next.
                line.send(_UNDERSTOOD)

    def _part_with_strangers(self) -> None:
        """Close the lines of those that have not said the token in time, or are too many."""
        before = time.monotonic() - _STRANGER_S
        too_many = len(self._strangers) - _NUM_STRANGERS
        for i, (line, (since, _)) in enumerate(list(self._strangers.items())):
            if i < too_many or since < before:
                self._drop(line)

    def _drop(self, line: socket.socket) -> None:
        del self._strangers[line]
        self._selector.unregister(line)
        line.close()


def _keep(line: socket.socket) -> None:
    with contextlib.suppress(AttributeError, OSError):
        # A process behind a cut link says nothing when it ends.
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_EVERY_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_EVERY_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_UNANSWERED)


if __name__ == "__main__":
    main()
