"""Begin and end the work with the other processes, and say which of them this one is."""

import os
from collections.abc import Sequence
from typing import Any

from unisono.errors import DisagreementError
from unisono.horovod import session as _session
from unisono.horovod import timeline
from unisono.horovod.models import leave_compile, watch_compile
from unisono.horovod.process_sets import ProcessSet, close_sets, open_sets

_TIMELINE = "HOROVOD_TIMELINE"


def init(comm: Sequence[int] | None = None, process_sets: Any = None) -> None:
    """Begin: every process of the run calls this first. Again, it does nothing.

    The processes are those that `unisono run` started (or `unisono.spawn`, torchrun, mpirun,
    srun); a program that was started by itself is a world of one, where every collective gives
    back what it was given.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.size()
    1
    """
    if _session.is_open():
        return
    given = _given_sets(process_sets)
    asked = [None if comm is None else list(comm), [each.ranks for each in given]]
    every = _session.open_session(asked)
    try:
        _check(asked, every)
        open_sets(given)
    except Exception:
        close_sets()
        _session.close_session()
        raise
    watch_compile()
    path = os.environ.get(_TIMELINE, "")
    if path and path.upper() != "DYNAMIC":
        timeline.start(path)


def shutdown() -> None:
    """End; `init` may be called again.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.shutdown()
    >>> hvd.is_initialized()
    False
    """
    timeline.stop()
    close_sets()
    leave_compile()
    _session.close_session()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` not since.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.is_initialized()
    True
    """
    return _session.is_open()


def rank() -> int:
    """This process' number among all, from 0.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.rank()
    0
    """
    return _session.session().rank


def local_rank() -> int:
    """This process' number among those of its node.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.local_rank()
    0
    """
    return _session.session().local_rank


def cross_rank() -> int:
    """This process' number among those with its local rank, one on each node.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.cross_rank()
    0
    """
    return _session.session().cross_rank


def size() -> int:
    """How many processes there are.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.size()
    1
    """
    return _session.session().size


def local_size() -> int:
    """How many processes this node has.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.local_size()
    1
    """
    return _session.session().local_size


def cross_size() -> int:
    """How many nodes have a process with this local rank.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.cross_size()
    1
    """
    return _session.session().cross_size


def is_homogeneous() -> bool:
    """Whether all nodes have the same number of processes.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.is_homogeneous()
    True
    """
    return _session.session().is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write every collective from now on to a file that chrome://tracing and Perfetto show.

    Rank 0 writes, for all ranks: a row for each rank and tensor, with the time that the rank
    waited for the others (`NEGOTIATE_ALLREDUCE`) and that of the collective itself (`ALLREDUCE`).
    The variable HOROVOD_TIMELINE does the same from `init` on. `mark_cycles` is accepted and does
    nothing: there are no cycles, a collective begins when all have come to it.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.start_timeline("timeline.json")
    >>> hvd.stop_timeline()
    """
    _session.session()
    timeline.start(file_path)


def stop_timeline() -> None:
    """Complete the file of `start_timeline`.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.stop_timeline()
    """
    _session.session()
    timeline.stop()


def _given_sets(process_sets: Any) -> list[ProcessSet]:
    if process_sets is None or process_sets == "dynamic":
        return []
    found = list(process_sets)
    for each in found:
        if not isinstance(each, ProcessSet):
            raise ValueError(
                f"Received process_sets with a {type(each).__name__}. Give a list of "
                "hvd.ProcessSet, or 'dynamic'."
            )
    return found


def _check(asked: list[Any], every: list[Any]) -> None:
    for number, other in enumerate(every):
        if other != every[0]:
            raise DisagreementError(
                f"Mismatched hvd.init(): rank 0 gave communicator and process sets {every[0]}, "
                f"rank {number} {other}. Every process must give the same."
            )
    ranks = asked[0]
    if ranks and sorted(ranks) != list(range(_session.session().size)):
        raise NotImplementedError(
            f"Asked for hvd.init(comm={ranks}), some ranks of {_session.session().size}. Call "
            "hvd.init() and give collectives a process_set=hvd.ProcessSet([...])."
        )
