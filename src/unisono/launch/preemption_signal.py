"""The warning that a run must soon make room, kept until training can act on it.

It comes as a signal: SIGUSR1 from our launcher or, where `unisono submit` asked for it, from Slurm;
SIGTERM from Slurm, which sends that to all processes of a job that it takes away. Outside of
training nobody would act on it, so there SIGTERM ends a process as always.
"""

import os
import signal
import threading

WARNING = signal.SIGUSR1
REQUEUE = "UNISONO_REQUEUE"
"""Set where a run that has made room is begun again by itself."""

_listening: set[int] = set()
_num_heeding = 0
_is_warned = False


def listen(*numbers: int) -> None:
    """Take these signals for a warning from now on, in a process that can."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in numbers:
        # What a program has made of a signal itself stays.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(number, _take)
            _listening.add(number)


def is_listening() -> bool:
    return bool(_listening)


def is_preempting() -> bool:
    return _is_warned


def warn() -> None:
    """Take it that a warning has come."""
    global _is_warned
    _is_warned = True


def heed(is_begun: bool) -> None:
    """Say that somebody begins, or ends, to look for a warning often."""
    global _num_heeding
    _num_heeding += 1 if is_begun else -1


def _take(number: int, frame: object) -> None:
    global _is_warned
    _is_warned = True
    if number == signal.SIGTERM and not _num_heeding:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
