"""The signal that announces a preemption, remembered until training can act on it.

SIGUSR1 comes from our launcher or, where `unisono submit` asked for it, from Slurm; SIGTERM from
Slurm, which sends it to all processes of a job that it preempts. Outside of training nothing would
act on it, so there SIGTERM ends a process as always. A module of its own, as it holds the state of
the process' signal handlers.
"""

import os
import signal
import threading

PREEMPTION_SIGNAL = signal.SIGUSR1
REQUEUE = "UNISONO_REQUEUE"
"""Set where a preempted run is queued again automatically."""

_handled: set[int] = set()
_num_watchers = 0
_is_preempting = False


def handle_signals(*numbers: int) -> None:
    """Take these signals as a preemption from now on, in the main thread of a process."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in numbers:
        # A handler that the program has installed stays.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(number, _receive)
            _handled.add(number)


def is_handling_signals() -> bool:
    return bool(_handled)


def is_preempting() -> bool:
    """Whether a preemption was announced to this process."""
    return _is_preempting


def request_preemption() -> None:
    """Act as if the signal had come."""
    global _is_preempting
    _is_preempting = True


def watch(is_begun: bool) -> None:
    """Note that a training begins, or ends, to check for a preemption at each step."""
    global _num_watchers
    _num_watchers += 1 if is_begun else -1


def _receive(number: int, frame: object) -> None:
    request_preemption()
    if number == signal.SIGTERM and not _num_watchers:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
