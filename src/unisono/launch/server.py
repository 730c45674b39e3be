"""The authenticated socket server of a run: what one client does can end its connection alone.

One thread serves all clients and never blocks on one of them: what cannot be sent at once is
buffered. A client that has not proved the secret yet has a few seconds, is never parsed, and is one
of a limited number. Where more connect, the oldest are dropped, so that a flood of them passes
and clients that know the secret get in.
"""

import contextlib
import logging
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable

from unisono.launch.wire import (
    REFUSAL,
    Frames,
    Handshake,
    Message,
    Session,
    TamperedError,
    encode,
    tune,
)
from unisono.log import logger

_TICK_S = 0.5
_UNAUTHENTICATED_S = 10.0
_GRACE_S = 0.05
"""How long a connection without a proof stays even where others want in: enough to prove."""
_MAX_UNAUTHENTICATED = 128
_UNAUTHENTICATED_PER_FILE = 1 / 8
_NO_FILES_S = 0.5
_BACKLOG = 1024


class Connection:
    """One connection, as the server sees it."""

    def __init__(self, server: "Server", sock: socket.socket, address: str) -> None:
        self.address = address
        self.since = time.monotonic()
        self.socket = sock
        self.handshake = Handshake(server.secret, server.port)
        self.session: Session | None = None
        self.outgoing = bytearray()
        self._server = server

    def admit(self) -> None:
        """Keep it, as its owner knows whose it is; all others are dropped after a while."""
        self._server.admit(self)

    def send(self, message: Message) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Send, now or as soon as the other end reads; does nothing where it is gone."""
        assert self.session is not None
        self._server.write(self, self.session.seal(data))


class Server:
    """Listens at one address; calls its owner from a thread of its own, with `lock` held.

    `on_message(connection, message)` is called for messages of clients that have proved the secret,
    `on_end(connection, how)` when such a connection has ended, `how` completing a sentence about
    it, and `on_tick(now)` at least twice a second. What they raise ends the connection that led to
    it.
    """

    def __init__(
        self,
        secret: str,
        *,
        host: str,
        port: int,
        name: str,
        on_message: Callable[[Connection, Message], None],
        on_end: Callable[[Connection, str], None] = lambda connection, how: None,
        on_tick: Callable[[float], None] = lambda now: None,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.secret = secret
        self.host: str
        self.port: int
        self.host, self.port = self._listener.getsockname()[:2]
        self.lock = threading.RLock()
        self._on_message = on_message
        self._on_end = on_end
        self._on_tick = on_tick
        self._connections: set[Connection] = set()
        self._newcomers: dict[Connection, None] = {}  # In the order in which they came.
        self._max_unauthenticated = _max_unauthenticated()
        self._is_open = True
        self._next_check = 0.0
        self._paused_until: float | None = None
        self._has_warned = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and end all connections that were not detached."""
        self._is_open = False
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _TICK_S)
        with self.lock:
            for connection in list(self._connections):
                self._forget(connection)
                connection.socket.close()
            self._listener.close()
            if not self._thread.is_alive():
                self._selector.close()

    def admit(self, connection: Connection) -> None:
        self._newcomers.pop(connection, None)

    def detach(self, connection: Connection) -> Frames:
        """Take a connection out of the server's hands; it then belongs to the caller."""
        assert connection.session is not None
        self._forget(connection)
        connection.socket.setblocking(True)
        return Frames(connection.socket, connection.session)

    def write(self, connection: Connection, data: bytes) -> None:
        with self.lock:
            if connection in self._connections:
                connection.outgoing += data
                self._flush(connection)

    # -- the server's thread -------------------------------------------------------------------

    def _serve(self) -> None:
        while self._is_open:
            try:
                for key, mask in self._selector.select(self._patience_s()):
                    with self.lock:
                        if key.fileobj is self._listener:
                            self._accept()
                        else:
                            self._handle(key.data, mask)
                with self.lock:
                    self._check_timeouts(time.monotonic())
            except Exception:  # A fault of the server, not of a client.
                logger.exception("The server at %s port %d failed; it continues.", *self._address)
                time.sleep(_TICK_S)

    @property
    def _address(self) -> tuple[str, int]:
        return self.host, self.port

    def _patience_s(self) -> float:
        until = self._next_check
        if self._paused_until is not None:
            until = min(until, self._paused_until)
        return max(0.0, until - time.monotonic())

    def _accept(self) -> None:
        if not self._admits_newcomer():
            return
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # Most likely no file descriptor is left.
            if not self._drop_oldest_newcomer():
                self._warn_once(error)
                self._pause(_NO_FILES_S)
            return
        try:
            sock.setblocking(False)
            tune(sock)
            connection = Connection(self, sock, str(address[0]))
            self._selector.register(sock, selectors.EVENT_READ, connection)
        except OSError:
            sock.close()
            return
        self._connections.add(connection)
        self._newcomers[connection] = None
        self.write(connection, connection.handshake.greeting)

    def _admits_newcomer(self) -> bool:
        """Whether one more client may connect; the oldest one without a proof may be dropped."""
        unauthenticated = self._unauthenticated()
        if len(unauthenticated) < self._max_unauthenticated:
            return True
        age_s = time.monotonic() - unauthenticated[0].since
        if age_s < _GRACE_S:
            self._pause(_GRACE_S - age_s)
            return False
        return self._drop_oldest_newcomer()

    def _unauthenticated(self) -> list[Connection]:
        return [each for each in self._newcomers if each.session is None]

    def _drop_oldest_newcomer(self) -> bool:
        unauthenticated = self._unauthenticated()
        if unauthenticated:
            self._drop(unauthenticated[0], "was dropped for newer connections")
        return bool(unauthenticated)

    def _warn_once(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "No more clients can connect to %s port %d now: %s. Raise the limit of open files "
                "(ulimit -n) if this lasts.",
                *self._address,
                error,
            )

    def _pause(self, seconds: float) -> None:
        """Accept nothing for a while. Waiting clients would else wake this thread all the time."""
        self._selector.unregister(self._listener)
        self._paused_until = time.monotonic() + seconds

    def _handle(self, connection: Connection, mask: int) -> None:
        if connection not in self._connections:
            return  # It ended while others were handled.
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush(connection)
            if mask & selectors.EVENT_READ:
                self._read(connection)
        except (TamperedError, PermissionError) as error:
            self._drop(connection, "was closed", str(error))
        except (EOFError, OSError):
            self._drop(connection, "is gone")
        except Exception as error:
            reason = f"its message is malformed ({error!r})"
            self._drop(connection, "was closed", reason)

    def _read(self, connection: Connection) -> None:
        data = connection.socket.recv(1 << 16)
        if not data:
            raise EOFError
        if connection.session is None:
            self._continue_handshake(connection, data)
            return
        connection.session.feed(data)
        while connection in self._connections:
            message = connection.session.take()
            if message is None:
                return
            self._on_message(connection, message)

    def _continue_handshake(self, connection: Connection, data: bytes) -> None:
        try:
            done = connection.handshake.feed(data)
        except PermissionError:
            self.write(connection, REFUSAL)
            raise
        if done is not None:
            answer, connection.session = done
            self.write(connection, answer)

    def _flush(self, connection: Connection) -> None:
        try:
            num_sent = connection.socket.send(connection.outgoing)
        except BlockingIOError:
            num_sent = 0
        except OSError:  # That it is gone is noticed where it is read.
            num_sent = len(connection.outgoing)
        del connection.outgoing[:num_sent]
        events = selectors.EVENT_READ
        if connection.outgoing:
            events |= selectors.EVENT_WRITE
        if self._selector.get_key(connection.socket).events != events:
            self._selector.modify(connection.socket, events, connection)

    def _drop(self, connection: Connection, how: str, reason: str = "") -> None:
        """End a connection; the owner is notified if it had proved the secret."""
        if connection not in self._connections:
            return
        text = f"{how}: {reason}" if reason else how
        is_unauthenticated = connection.session is None
        who = connection.address, self.port
        # Anybody can trigger this without a proof, as often as they like.
        level = logging.WARNING if reason and not is_unauthenticated else logging.DEBUG
        logger.log(level, "The connection from %s to port %d %s.", *who, text)
        if reason and not is_unauthenticated:
            connection.send({"dropped": reason})
        self._forget(connection)
        connection.socket.close()
        if not is_unauthenticated:
            self._on_end(connection, text)

    def _forget(self, connection: Connection) -> None:
        self._connections.remove(connection)
        self._newcomers.pop(connection, None)
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(connection.socket)

    def _check_timeouts(self, now: float) -> None:
        if self._paused_until is not None and now >= self._paused_until:
            self._paused_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        if now < self._next_check:
            return
        self._next_check = now + _TICK_S
        for connection in list(self._newcomers):
            if now - connection.since > _UNAUTHENTICATED_S:
                self._drop(connection, "did not identify itself in time")
        self._on_tick(now)


def _max_unauthenticated() -> int:
    """So few that the process can still open all the files that it needs."""
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most_files == resource.RLIM_INFINITY:
        return _MAX_UNAUTHENTICATED
    return max(4, min(_MAX_UNAUTHENTICATED, int(most_files * _UNAUTHENTICATED_PER_FILE)))
