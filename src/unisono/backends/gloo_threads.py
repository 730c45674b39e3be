"""gloo's communication thread beside the computation of a CPU replica.

When data arrives, gloo's thread wants a lock. Where the computing thread holds it, gloo polls the
socket again and again without a pause. If both share a core, as they do where a replica is pinned
to one, the lock's holder waits until the scheduler interrupts the poller: 4 ms for each collective
in place of 0.1, and more beside other programs. So gloo's thread may run on all cores of the node,
and does not interrupt a computation when it wakes up.
"""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def placed_apart() -> Iterator[None]:
    """Schedule the threads that are started inside as communication threads."""
    before = _threads()
    yield
    for thread in _threads() - before:
        # A thread may have ended; not every system has these calls.
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
            # The cores that the launcher may use, before it gave each process its own.
            os.sched_setaffinity(thread, os.sched_getaffinity(os.getppid()))


def _threads() -> set[int]:
    with contextlib.suppress(OSError):
        return {int(name) for name in os.listdir("/proc/self/task")}
    return set()
