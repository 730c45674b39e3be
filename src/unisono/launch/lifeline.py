"""Ends a worker when the process that started it is gone.

Two signs are watched from a thread of their own, which runs while the main thread sits in a
collective: the line's end, and a new parent. (The kernel's parent-death signal follows the thread
that started us, which may end long before its process.)
"""

import os
import selectors
import socket
import threading

_POLL_S = 1.0


def end_with_parent(line: socket.socket) -> None:
    """Leave this process, at once, when the other end of `line` is closed or the parent changes."""
    parent = os.getppid()
    threading.Thread(target=_watch, args=(line, parent), daemon=True).start()


def _watch(line: socket.socket, parent: int) -> None:
    # Only the end of the line is looked for: reading belongs to the main thread.
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
