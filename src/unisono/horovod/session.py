"""What `init` found out: who this process is, in Horovod's words. Nothing works before it."""

from dataclasses import dataclass
from typing import Any

from unisono.launch.client import World, current_world
from unisono.topology import topology


@dataclass(frozen=True)
class Session:
    """This process' place among those of the run; `cross` counts those with its local rank."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    is_homogeneous: bool = True


_session: Session | None = None


def session() -> Session:
    """The session that `init` opened; ValueError, as in Horovod, where there is none."""
    if _session is None:
        raise ValueError("unisono.horovod has not been initialized; use hvd.init().")
    return _session


def is_open() -> bool:
    return _session is not None


def open_session(note: Any) -> list[Any]:
    """Meet the other processes; every process' note, in rank order."""
    global _session
    facts = topology()
    world = current_world()
    if world is None:
        _session = Session()
        return [note]
    place = [facts.node, facts.local_rank, facts.local_size]
    answers = world.all_gather("hvd.init()", [place, note])
    places = [tuple(answer[0]) for answer in answers]
    peers = [rank for rank, other in enumerate(places) if other[1] == facts.local_rank]
    _session = Session(
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
    """The line to the other processes, once `init` was called; None in a world of one."""
    session()
    return current_world()
