"""Messages between the processes of a run: JSON in frames, authenticated by the run's secret.

No pickles: what arrives from a network must not be able to run code. Both ends prove the secret
before anything is parsed, with messages of fixed size. From the secret and both ends' nonces
follows a key for each direction, and every record carries a MAC over a counter and the content: a
record that was changed, replayed, dropped or injected ends the connection. Nothing is encrypted.

    server  MAGIC, 32 random bytes
    client  32 random bytes, its proof of the secret
    server  its own proof, or 32 zeros
    both    records: MAC (16 bytes), content

A message is one record of fixed size, its length included, and a second one if it is longer.

On one node the launcher draws the secret. Across nodes, and under another launcher, it must be
known before anything is sent: `UNISONO_SECRET`, or a file of the user that all nodes have, as home
folders usually are shared. The secret of a run is derived from it and never sent.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import LaunchError
from unisono.launch.network import join_address

Message = dict[str, Any]

_MAGIC = b"unisono3"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_CODE_BYTES = 16
_LENGTH = struct.Struct("!I")
_COUNTER = struct.Struct("!Q")
_HEAD_BYTES = 240
"""The size of a message's first record, without its code; most messages fit into it."""
_MOST_BYTES = 1 << 28
_UNANSWERED_S = 30

REFUSAL = bytes(_PROOF_BYTES)
"""The answer to a client without the secret."""


class TamperedError(ConnectionError):
    """What has arrived is not what was sent; for this module and its users."""

    def __init__(self) -> None:
        super().__init__(
            "a message was altered, repeated or left out on its way (its authentication code is "
            "wrong), so the connection was closed"
        )


class Session:
    """One end of a connection whose ends have proved the secret; knows no socket.

    `seal` makes bytes of a message, `feed` and `take` make messages of bytes.
    """

    def __init__(self, sending_key: bytes, receiving_key: bytes) -> None:
        # Copying these is cheaper than deriving from the key each time.
        self._sending = hmac.new(sending_key, digestmod="sha256")
        self._receiving = hmac.new(receiving_key, digestmod="sha256")
        self._num_sent = 0
        self._num_received = 0
        self._received = bytearray()
        self._head: bytes | None = None

    def seal(self, data: bytes) -> bytes:
        """The records of an encoded message, to be sent in this order."""
        head = (_LENGTH.pack(len(data)) + data[: _HEAD_BYTES - _LENGTH.size]).ljust(_HEAD_BYTES)
        rest = data[_HEAD_BYTES - _LENGTH.size :]
        return self._sign(head) + (self._sign(rest) if rest else b"")

    def feed(self, data: bytes) -> None:
        """Add received bytes, which may be a part of a message, or several."""
        self._received += data

    def take(self) -> Message | None:
        """The next complete message; TamperedError where it is not what the other end has sent."""
        if self._head is None:
            self._head = self._open(_HEAD_BYTES)
        if self._head is None:
            return None
        (length,) = _LENGTH.unpack_from(self._head)
        data = self._head[_LENGTH.size : _LENGTH.size + length]
        if len(data) < length:
            rest = self._open(length - len(data))
            if rest is None:
                return None
            data += rest
        self._head = None
        message = json.loads(data)
        if not isinstance(message, dict):
            raise TypeError(f"a message that is a {type(message).__name__}")
        return message

    def _sign(self, content: bytes) -> bytes:
        code = _code(self._sending, self._num_sent, content)
        self._num_sent += 1
        return code + content

    def _open(self, num_bytes: int) -> bytes | None:
        end = _CODE_BYTES + num_bytes
        if len(self._received) < end:
            return None
        content = bytes(self._received[_CODE_BYTES:end])
        code = _code(self._receiving, self._num_received, content)
        if not hmac.compare_digest(code, bytes(self._received[:_CODE_BYTES])):
            raise TamperedError
        self._num_received += 1
        del self._received[:end]
        return content


def _code(keyed: hmac.HMAC, number: int, content: bytes) -> bytes:
    state = keyed.copy()
    state.update(_COUNTER.pack(number) + content)
    return state.digest()[:_CODE_BYTES]


def encode(message: Message) -> bytes:
    """A message as bytes, to be sealed; ValueError where it is too long."""
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > _MOST_BYTES:
        raise ValueError(f"a message of {len(data)} bytes; the most are {_MOST_BYTES}")
    return data


class Frames:
    """A socket that carries messages, for code that may block."""

    def __init__(self, sock: socket.socket, session: Session) -> None:
        self.socket = sock
        self._session = session

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Message) -> None:
        data = encode(message)
        try:
            self.socket.sendall(self._session.seal(data))
        except BaseException:
            # Half a message may have been sent, or one was counted and not sent: the other end
            # could verify nothing after that.
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)
            raise

    def receive(self) -> Message:
        """The next message, waiting for it; EOFError when the other end is gone."""
        while (message := self._session.take()) is None:
            self._fill()
        return message

    def receive_available(self) -> list[Message]:
        """All complete messages after one read, which must be ready; EOFError at the end."""
        self._fill()
        messages = []
        while (message := self._session.take()) is not None:
            messages.append(message)
        return messages

    def close(self) -> None:
        self.socket.close()

    def _fill(self) -> None:
        data = self.socket.recv(1 << 16)
        if not data:
            raise EOFError
        self._session.feed(data)


@dataclass(frozen=True)
class _Keys:
    """All that is derived from a secret and the nonces of one connection."""

    client_proof: bytes
    server_proof: bytes
    client_key: bytes
    server_key: bytes

    @classmethod
    def derive(cls, secret: str, port: int, server_nonce: bytes, client_nonce: bytes) -> "_Keys":
        # The port as well: a relay that listens at another one is detected. Not the address, which
        # may be translated on the way.
        facts = _MAGIC + port.to_bytes(2, "big") + server_nonce + client_nonce
        root = hmac.digest(secret.encode(), facts, "sha256")
        purposes = (b"client proof", b"server proof", b"client key", b"server key")
        return cls(*(hmac.digest(root, purpose, "sha256") for purpose in purposes))


class Handshake:
    """The server's side of the handshake, fed with what a stranger sends; knows no socket."""

    def __init__(self, secret: str, port: int) -> None:
        self._secret = secret
        self._port = port
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._received = b""

    @property
    def greeting(self) -> bytes:
        """What a server sends first."""
        return _MAGIC + self._nonce

    def feed(self, data: bytes) -> tuple[bytes, Session] | None:
        """The answer and the session once the proof is there; PermissionError if it is none."""
        self._received += data
        if len(self._received) < _NONCE_BYTES + _PROOF_BYTES:
            return None
        nonce, proof = self._received[:_NONCE_BYTES], self._received[_NONCE_BYTES:]
        keys = _Keys.derive(self._secret, self._port, self._nonce, nonce)
        # A client that sends more has not waited for the server's proof.
        if not hmac.compare_digest(proof, keys.client_proof):
            raise PermissionError("it has not proved the run's secret")
        return keys.server_proof, Session(keys.server_key, keys.client_key)


def greet(sock: socket.socket, secret: str, timeout_s: float) -> Frames:
    """The client's side of the handshake; nothing else is sent before the server's proof.

    EOFError or OSError where the server closes or sends too little in time, LaunchError where it is
    something else or does not prove the secret.
    """
    deadline = time.monotonic() + timeout_s
    greeting = _read(sock, len(_MAGIC) + _NONCE_BYTES, deadline)
    if not greeting.startswith(_MAGIC):
        host, port = sock.getpeername()[:2]
        raise LaunchError(
            f"What listens at {join_address(host, port)} is not the rendezvous server of this run: "
            "it is something else, or another version of unisono. Choose a free port, and install "
            "the same version on all nodes."
        )
    nonce = secrets.token_bytes(_NONCE_BYTES)
    port = sock.getpeername()[1]
    keys = _Keys.derive(secret, port, greeting[len(_MAGIC) :], nonce)
    sock.sendall(nonce + keys.client_proof)
    if not hmac.compare_digest(_read(sock, _PROOF_BYTES, deadline), keys.server_proof):
        raise LaunchError(
            "The rendezvous server refused this process: their secrets differ. Give every node the "
            "same UNISONO_SECRET, or the same file ~/.config/unisono/secret."
        )
    sock.settimeout(None)
    tune(sock)
    return Frames(sock, Session(keys.client_key, keys.server_key))


def tune(sock: socket.socket) -> None:
    """Send without delay, and notice soon that the other end does not answer any more."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A cut link answers nothing at all; without this a send would be tried for minutes.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        timeout_ms = _UNANSWERED_S * 1000
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


def _read(sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        # For all of it: a server that sends a byte at a time must not block us for long.
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise EOFError
        data += part
    return data


SECRET = "UNISONO_SECRET"


def new_secret() -> str:
    return secrets.token_hex(32)


def shared_secret(env: Mapping[str, str]) -> str:
    """The user's secret: the variable, or the file, which is created where there is none."""
    return env.get(SECRET) or _from_file(Path.home() / ".config" / "unisono" / "secret")


def secret_of_run(shared: str, run: str) -> str:
    """One run's secret, so that a process never joins another run of the same user."""
    return hmac.new(shared.encode(), f"unisono run {run}".encode(), hashlib.sha256).hexdigest()


def _from_file(path: Path) -> str:
    try:
        if not path.exists():
            _make(path)
        _check(path)
        return path.read_text().strip()
    except OSError as error:
        raise LaunchError(
            f"Looked for this user's secret in {path}: {error}. Make it readable for you alone, "
            f"or set {SECRET} to the same long random text on every node."
        ) from error


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(file, "w") as text:
            text.write(new_secret() + "\n")
            text.flush()
            os.fsync(text.fileno())
        # Of several processes that start at once, one creates the file.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def _check(path: Path) -> None:
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(found.st_mode) & 0o077:
        raise LaunchError(
            f"The secret in {path} can be read by others. Remove it, and a new one is made, or "
            f"make it yours alone: chmod 600 {path}."
        )
    if not found.st_size:
        raise LaunchError(f"The secret in {path} is empty. Remove it, and a new one is made.")
