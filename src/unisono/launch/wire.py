"""Messages between the processes of a run: JSON in frames, after both ends proved the run's secret.

No pickles: what arrives from a network must not be able to run code. The proof keeps strangers out
(each end answers the other's random challenge); it does not encrypt.
"""

import hashlib
import hmac
import json
import secrets
import socket
import struct
from typing import Any

from unisono.errors import LaunchError

Message = dict[str, Any]

_LENGTH = struct.Struct("!I")
_MOST_BYTES = 1 << 28
_MOST_BYTES_OF_STRANGERS = 1 << 12
_UNANSWERED_S = 30


class Frames:
    """A socket that carries messages; half a message is kept until the rest arrives."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.is_trusted = False
        self._received = bytearray()
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A cut link answers nothing at all; without this a send would be tried for minutes.
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                timeout_ms = _UNANSWERED_S * 1000
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Message) -> None:
        data = json.dumps(message, separators=(",", ":")).encode()
        self.socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Message:
        """The next message, waiting for it; EOFError when the other end is gone."""
        while (message := self._take()) is None:
            self._fill()
        return message

    def receive_available(self) -> list[Message]:
        """All whole messages after one read, which must be ready; EOFError at the end."""
        self._fill()
        messages = []
        while (message := self._take()) is not None:
            messages.append(message)
        return messages

    def close(self) -> None:
        self.socket.close()

    def _fill(self) -> None:
        data = self.socket.recv(1 << 16)
        if not data:
            raise EOFError
        self._received += data

    def _take(self) -> Message | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > (_MOST_BYTES if self.is_trusted else _MOST_BYTES_OF_STRANGERS):
            raise EOFError  # Not one of ours.
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        data = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        try:
            message = json.loads(data)
        except ValueError:
            raise EOFError from None
        if not isinstance(message, dict):
            raise EOFError
        return message


def challenge() -> str:
    """A random text for the other end to prove the secret with."""
    return secrets.token_hex(16)


def proof(secret: str, role: str, theirs: str, ours: str) -> str:
    text = f"unisono {role} {theirs} {ours}".encode()
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()


def is_proof(found: object, secret: str, role: str, theirs: str, ours: str) -> bool:
    return isinstance(found, str) and hmac.compare_digest(found, proof(secret, role, theirs, ours))


def greet(frames: Frames, secret: str) -> None:
    """The caller's side of the proof; the host's first message is its challenge."""
    theirs = str(frames.receive().get("challenge"))
    ours = challenge()
    frames.send({"challenge": ours, "proof": proof(secret, "caller", theirs, ours)})
    answer = frames.receive()
    if not is_proof(answer.get("proof"), secret, "host", ours, theirs):
        raise LaunchError(
            "The run's meeting point refused this process: their secrets differ. Give every node "
            "the same UNISONO_SECRET, or the same file ~/.config/unisono/secret."
        )
    frames.is_trusted = True


def answer_greeting(frames: Frames, secret: str) -> None:
    """The host's side of the proof, for who waits for it; LaunchError where it fails."""
    ours = challenge()
    frames.send({"challenge": ours})
    message = frames.receive()
    theirs = str(message.get("challenge"))
    if not is_proof(message.get("proof"), secret, "caller", ours, theirs):
        frames.send({"error": "secret"})
        raise LaunchError("A process without the run's secret has called.")
    frames.is_trusted = True
    frames.send({"proof": proof(secret, "host", theirs, ours)})
