"""This process' rank and sizes, its seed, and process sets. All of it needs `init` first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unisono.errors import DisagreementError
from unisono.launch.client import World, current_world
from unisono.replication.random_state import SEED_STRIDE, set_seed
from unisono.topology import topology


@dataclass(frozen=True)
class HorovodSession:
    """This process' ranks; `cross` counts the processes with the same local rank."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    is_homogeneous: bool = True


_session: HorovodSession | None = None


def session() -> HorovodSession:
    """The session that `init` opened; raises ValueError, as Horovod does, if there is none."""
    if _session is None:
        raise ValueError("unisono.horovod has not been initialized; use hvd.init().")
    return _session


def is_open() -> bool:
    return _session is not None


def open_session(note: Any) -> list[Any]:
    """Synchronize with the other processes; returns every process' note, in rank order."""
    global _session
    facts = topology()
    world = current_world()
    if world is None:
        _session = HorovodSession()
        return [note]
    place = [facts.node, facts.local_rank, facts.local_size]
    answers = world.all_gather("hvd.init()", [place, note])
    places = [tuple(answer[0]) for answer in answers]
    peers = [rank for rank, other in enumerate(places) if other[1] == facts.local_rank]
    _session = HorovodSession(
        rank=world.rank,
        size=world.size,
        local_rank=facts.local_rank,
        local_size=facts.local_size,
        cross_rank=peers.index(world.rank),
        cross_size=len(peers),
        is_homogeneous=len({local_size for _, _, local_size in places}) == 1,
    )
    return [answer[1] for answer in answers]


def close_session() -> None:
    global _session
    _session = None


def world_of_session() -> World | None:
    """The connection to the other processes; None if there is only this one."""
    session()
    return current_world()


def seed_processes() -> None:
    """Give this process its own seed.

    The processes of a run start with one seed, so that `parallel` shuffles global batches alike.
    With Horovod's interface each process shuffles its own data: with one seed all of them would
    train on the same batches.
    """
    world = current_world()
    if world is not None:
        set_seed((world.seed + world.rank * SEED_STRIDE) % 2**31)


class ProcessSet:
    """Processes that call collectives together; registered with `init` or `add_process_set`.

    >>> ProcessSet([1, 0]).ranks
    [0, 1]
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        if isinstance(ranks, str) or not isinstance(ranks, Sequence | range | set):
            raise ValueError(
                f"Received ranks of type {type(ranks).__name__}. Give a list of ranks; sets made "
                "of an MPI communicator are not supported."
            )
        if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"Received ranks {list(ranks)}. Give integers.")
        self.process_set_id: int | None = None
        self.ranks: list[int] = sorted(ranks)

    def size(self) -> int | None:
        """The number of processes; None before it is registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process' index in it; None before it is registered, or outside of it."""
        if self.process_set_id is None or not self.included():
            return None
        return self.ranks.index(session().rank)

    def included(self) -> bool:
        """Whether this process belongs to it."""
        return session().rank in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
"""All processes of the run."""
global_process_set.process_set_id = 0

_sets: dict[int, ProcessSet] = {0: global_process_set}


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set of ranks, in every process of the run; returns it.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.add_process_set([0])
    Traceback (most recent call last):
    ...
    ValueError: A process set of ranks [0] exists already...
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _agree("add_process_set", added.ranks)
    register(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set of ranks, in every process of the run; returns whether it was registered.

    >>> remove_process_set(global_process_set)
    False
    """
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    _agree("remove_process_set", process_set.ranks)
    process_set.process_set_id = None
    return _sets.pop(number, None) is not None


def register(process_set: ProcessSet) -> None:
    """Give a set its id; every process registers the same sets in the same order."""
    size = session().size
    unknown = [rank for rank in process_set.ranks if not 0 <= rank < size]
    if unknown or not process_set.ranks:
        raise ValueError(
            f"Asked for a process set of ranks {process_set.ranks}; this run has ranks 0 to "
            f"{size - 1}. Give one or more of those."
        )
    if len(set(process_set.ranks)) < len(process_set.ranks):
        raise ValueError(f"Received ranks {process_set.ranks}. Give each rank once.")
    if any(process_set.ranks == other.ranks for other in _sets.values()):
        raise ValueError(
            f"A process set of ranks {process_set.ranks} exists already. Use the object that "
            "was registered."
        )
    process_set.process_set_id = max(_sets) + 1
    _sets[process_set.process_set_id] = process_set


def open_sets(process_sets: Sequence[ProcessSet]) -> None:
    """Register the sets that `init` was given."""
    global_process_set.ranks = list(range(session().size))
    for process_set in process_sets:
        register(process_set)


def close_sets() -> None:
    """Remove all sets but the global one."""
    for number in [number for number in _sets if number]:
        _sets.pop(number).process_set_id = None
    global_process_set.ranks = []


def check_member(process_set: Any) -> ProcessSet:
    """The set, if this process may call collectives in it."""
    if not isinstance(process_set, ProcessSet):
        raise ValueError(
            f"Received process_set of type {type(process_set).__name__}. Give a hvd.ProcessSet."
        )
    rank = session().rank
    if process_set.process_set_id is None:
        raise ValueError(
            f"The process set of ranks {process_set.ranks} is not registered. Give it to "
            "hvd.init(process_sets=[...]), or call hvd.add_process_set in every process."
        )
    if rank not in process_set.ranks:
        raise ValueError(
            f"Rank {rank} is not in the process set of ranks {process_set.ranks}. Call its "
            "collectives under `if process_set.included():`."
        )
    return process_set


def _agree(what: str, ranks: list[int]) -> None:
    world = world_of_session()
    if world is None:
        return
    every = world.all_gather(f"hvd.{what}", ranks)
    for rank, other in enumerate(every):
        if other != every[0]:
            raise DisagreementError(
                f"Mismatched hvd.{what}: rank 0 gave ranks {every[0]}, rank {rank} {other}. Every "
                "process must register the same sets, also those that it does not belong to."
            )
