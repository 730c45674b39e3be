"""A private channel between a process and a worker it started: messages, and shared memory.

The channel is a socket pair inherited by the worker, so nobody else can write to it; that is why
pickles may travel on it. Memory is an anonymous file handed over the same way: it has no name, is
not bound by the size of /dev/shm, and is gone with the last process that maps it. A worker ends
when its parent is gone (`end_with_parent`).
"""

import mmap
import os
import pickle
import selectors
import socket
import struct
import tempfile
import threading
from typing import Any

_LENGTH = struct.Struct("!Q")


class Channel:
    """One end of it. Messages are any picklable objects and arrive in order."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    @classmethod
    def pair(cls) -> tuple["Channel", socket.socket]:
        """Our end, and the socket that a worker inherits."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Any:
        """The next message; EOFError when the other end is gone."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return pickle.loads(self._read(length))

    def send_memory(self, memory: "SharedMemory") -> None:
        """Hand memory over; the other end must call `receive_memory` next."""
        socket.send_fds(self._socket, [_LENGTH.pack(memory.num_bytes)], [memory.file])

    def receive_memory(self) -> "SharedMemory":
        data, files, _, _ = socket.recv_fds(self._socket, _LENGTH.size, 1)
        if len(data) != _LENGTH.size or not files:
            raise EOFError
        (num_bytes,) = _LENGTH.unpack(data)
        return SharedMemory(files[0], num_bytes)

    def close(self) -> None:
        self._socket.close()

    def _read(self, num_bytes: int) -> bytes:
        parts = []
        while num_bytes:
            part = self._socket.recv(min(num_bytes, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)


class SharedMemory:
    """Anonymous memory that can be handed to another process."""

    def __init__(self, file: int, num_bytes: int) -> None:
        self.file = file
        self.num_bytes = num_bytes
        self.buffer = mmap.mmap(file, num_bytes)

    @classmethod
    def create(cls, num_bytes: int) -> "SharedMemory":
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("unisono")
        else:
            file, path = tempfile.mkstemp(prefix="unisono-")
            os.unlink(path)
        os.ftruncate(file, num_bytes)
        return cls(file, num_bytes)

    def close(self) -> None:
        """Close the file. Views of the buffer stay valid until they are dropped."""
        os.close(self.file)


_POLL_S = 1.0


def end_with_parent(line: socket.socket) -> None:
    """Exit this process at once when the other end of `line` is closed or the parent changes.

    Watched by a thread, which runs while the main thread is in a collective. (The kernel's
    parent-death signal follows the thread that started us, which may end before its process.)
    """
    parent = os.getppid()
    threading.Thread(target=_watch, args=(line, parent), daemon=True).start()


def _watch(line: socket.socket, parent: int) -> None:
    # Only the end of the stream is looked for: messages belong to the main thread.
    with selectors.DefaultSelector() as selector:
        selector.register(line, selectors.EVENT_READ)
        while os.getppid() == parent:
            if selector.select(_POLL_S) and _is_closed(line):
                break
    os._exit(1)


def _is_closed(line: socket.socket) -> bool:
    try:
        if line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            # A message waits for the main thread, which may be busy: do not spin.
            threading.Event().wait(_POLL_S)
            return False
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True
