"""Ends the processes of a run whose launcher was killed, whatever they are busy with.

A process watches its launcher itself, from a thread; but while C code holds the interpreter's lock
no thread of it runs. So a small process waits, which only reads its input: `+123` names a process
group to kill when the input ends, `-123` takes that back. A file of its own, as it is run by its
path in an isolated interpreter.
"""

import contextlib
import os
import signal
import subprocess
import sys


class OrphanReaper:
    """The launcher's end of it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )

    def watch(self, group: int) -> None:
        self._send(f"+{group}\n")

    def forget(self, group: int) -> None:
        self._send(f"-{group}\n")

    def close(self) -> None:
        """End it, with the groups that it still watches."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _send(self, text: str) -> None:
        assert self._process.stdin is not None
        # If somebody killed it, the processes' own watch remains.
        with contextlib.suppress(OSError):
            self._process.stdin.write(text.encode())


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
