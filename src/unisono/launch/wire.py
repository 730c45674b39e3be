"""Messages between the processes of a run: JSON in frames, each authenticated by the run's secret.

No pickles: what arrives from a network must not be able to run code. Both ends prove the secret
before anything is parsed, by messages of fixed sizes. From the secret and both ends' random
numbers follows a key for each direction, and every record carries a code made with it over a
counter and the content: what was changed, repeated, left out or put in on the way is noticed, and
ends the connection. Nothing is encrypted.

    host    MAGIC, 32 random bytes
    caller  32 random bytes, its proof of the secret
    host    its own proof, or 32 zeros
    both    records: code (16 bytes), content

A message is one record of fixed size, its length included, and a second one if it is longer.
"""

import contextlib
import hmac
import json
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

from unisono.errors import LaunchError
from unisono.launch.network import join_address

Message = dict[str, Any]

_MAGIC = b"unisono2"
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
"""What a caller without the secret is answered."""


class TamperedError(ConnectionError):
    """Of this module and those that use it: what has arrived is not what was sent."""

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
        # Copies of these are cheaper than starting from the key each time.
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
        """Take in what has arrived, which may be a part of a message, or several."""
        self._received += data

    def take(self) -> Message | None:
        """The next whole message; TamperedError where it is not what the other end has sent."""
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
    """A socket that carries messages, for who may wait for them."""

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
            # Half a message may have gone out, or one was counted and did not: after that nothing
            # else would be understood.
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)
            raise

    def receive(self) -> Message:
        """The next message, waiting for it; EOFError when the other end is gone."""
        while (message := self._session.take()) is None:
            self._fill()
        return message

    def receive_available(self) -> list[Message]:
        """All whole messages after one read, which must be ready; EOFError at the end."""
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
    """All that follows from a secret and the random numbers of one connection."""

    caller_proof: bytes
    host_proof: bytes
    caller_key: bytes
    host_key: bytes

    @classmethod
    def derive(cls, secret: str, port: int, host_nonce: bytes, caller_nonce: bytes) -> "_Keys":
        # The port as well: who listens at another one and passes on what a host says is found out.
        # Not the address, which may be translated on the way.
        facts = _MAGIC + port.to_bytes(2, "big") + host_nonce + caller_nonce
        root = hmac.digest(secret.encode(), facts, "sha256")
        purposes = (b"caller proof", b"host proof", b"caller key", b"host key")
        return cls(*(hmac.digest(root, purpose, "sha256") for purpose in purposes))


class Handshake:
    """The host's side of the proof, fed with what a stranger sends; knows no socket."""

    def __init__(self, secret: str, port: int) -> None:
        self._secret = secret
        self._port = port
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._received = b""

    @property
    def greeting(self) -> bytes:
        """What a host says first."""
        return _MAGIC + self._nonce

    def feed(self, data: bytes) -> tuple[bytes, Session] | None:
        """The answer and the session once the proof is there; PermissionError if it is none."""
        self._received += data
        if len(self._received) < _NONCE_BYTES + _PROOF_BYTES:
            return None
        nonce, proof = self._received[:_NONCE_BYTES], self._received[_NONCE_BYTES:]
        keys = _Keys.derive(self._secret, self._port, self._nonce, nonce)
        # One that says more has not waited for the host's proof.
        if not hmac.compare_digest(proof, keys.caller_proof):
            raise PermissionError("it has not proved the run's secret")
        return keys.host_proof, Session(keys.host_key, keys.caller_key)


def greet(sock: socket.socket, secret: str, timeout_s: float) -> Frames:
    """The caller's side of the proof; nothing else is sent before the host has proved itself.

    EOFError or OSError where the host goes or says too little in time, LaunchError where it is
    something else or does not prove the secret.
    """
    deadline = time.monotonic() + timeout_s
    greeting = _read(sock, len(_MAGIC) + _NONCE_BYTES, deadline)
    if not greeting.startswith(_MAGIC):
        host, port = sock.getpeername()[:2]
        raise LaunchError(
            f"What listens at {join_address(host, port)} is not the meeting point of this run: it "
            "is something else, or another version of unisono. Choose a free port, and have the "
            "same version on all nodes."
        )
    nonce = secrets.token_bytes(_NONCE_BYTES)
    port = sock.getpeername()[1]
    keys = _Keys.derive(secret, port, greeting[len(_MAGIC) :], nonce)
    sock.sendall(nonce + keys.caller_proof)
    if not hmac.compare_digest(_read(sock, _PROOF_BYTES, deadline), keys.host_proof):
        raise LaunchError(
            "The run's meeting point refused this process: their secrets differ. Give every node "
            "the same UNISONO_SECRET, or the same file ~/.config/unisono/secret."
        )
    sock.settimeout(None)
    tune(sock)
    return Frames(sock, Session(keys.caller_key, keys.host_key))


def tune(sock: socket.socket) -> None:
    """Send without delay, and notice soon that nobody answers any more."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A cut link answers nothing at all; without this a send would be tried for minutes.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        timeout_ms = _UNANSWERED_S * 1000
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


def _read(sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        # For all of it: one that says a byte at a time must not keep us for long.
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise EOFError
        data += part
    return data
