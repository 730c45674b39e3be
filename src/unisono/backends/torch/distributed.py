"""The processes of a run, as groups of torch's collectives.

Only torch itself is imported here: a process joins while its import of Keras is still under way.
The groups are made when they are first used, since torch can do so at any time.
"""

import os
from collections.abc import Sequence

from unisono.backends.torch.process_group import Group
from unisono.backends.torch.store import MeetingStore
from unisono.errors import StrategyError
from unisono.launch.client import World, current_world
from unisono.launch.network import interface_of
from unisono.launch.source_filter import OnlyFrom, source_addresses

_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
_groups: dict[tuple[int, ...], Group] = {}


def join(world: World) -> None:
    """Prepare this process for collectives with the others."""
    # NCCL would choose an interface by itself; gloo is told the address.
    if _NCCL_INTERFACE not in os.environ and (interface := interface_of(world.host)):
        os.environ[_NCCL_INTERFACE] = f"={interface}"


def world_group(ranks: Sequence[int] | None = None) -> Group:
    """The group of some processes of the run, or of all; each of them must ask for it."""
    world = current_world()
    if world is None:
        raise StrategyError(
            "Asked for collectives between processes, but this one runs alone. Start several with "
            "`unisono run --replicas N script.py`, or with unisono.spawn."
        )
    members = tuple(range(world.size)) if ranks is None else tuple(sorted(set(ranks)))
    if members not in _groups:
        _check(members, world)
        _groups[members] = _make(members, world)
    return _groups[members]


def _make(members: tuple[int, ...], world: World) -> Group:
    from unisono.backends.torch.devices import default_device

    name = "torch/" + ",".join(map(str, members))
    # Whoever is missing is named here; torch would wait for minutes, and then not say for whom.
    topic = f"collectives of ranks {', '.join(map(str, members))}"
    hosts = world.all_gather(topic, world.host, members)
    sources = source_addresses(world, hosts, members)
    store = MeetingStore(world, name)
    rank = members.index(world.rank)
    with OnlyFrom(sources, host=world.host):
        return Group(store, rank, len(members), default_device(), host=world.host)


def _check(members: tuple[int, ...], world: World) -> None:
    unknown = [rank for rank in members if not 0 <= rank < world.size]
    if unknown:
        raise StrategyError(
            f"Asked for collectives with ranks {unknown}; the ranks of this run are 0 to "
            f"{world.size - 1}. Choose among those."
        )
    if world.rank not in members:
        raise StrategyError(
            f"Asked for collectives of ranks {list(members)} in rank {world.rank}, which is none "
            "of them. Ask for them in those processes only."
        )
