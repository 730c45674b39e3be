"""Frozen facts about this process: its rank, the world's size, its node. Read once."""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass

from unisono.errors import LaunchError

JOINED = "UNISONO_JOINED"


@dataclass(frozen=True)
class Topology:
    """Where this process stands among those of its run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    num_nodes: int = 1
    coordinator: str | None = None
    """`host:port` of the run's meeting point."""
    launcher: str = "none"

    @property
    def is_chief(self) -> bool:
        return self.rank == 0


@functools.cache
def topology() -> Topology:
    """Where this process stands among those of its run; a world of one where it runs alone.

    >>> topology().is_chief
    True
    """
    return read_topology(os.environ)


def read_topology(env: Mapping[str, str]) -> Topology:
    """What the variables of a launcher say."""
    if env.get(JOINED, str(os.getpid())) != str(os.getpid()):
        return Topology()  # Started by a process of the run, and none of its own.
    if "UNISONO_RANK" not in env:
        return Topology()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "NODE", "NUM_NODES")
    try:
        rank, size, local_rank, local_size, node, num_nodes = (
            int(env[f"UNISONO_{name}"]) for name in names
        )
    except (KeyError, ValueError) as error:
        raise LaunchError(f"The variables of the launcher make no sense: {error}.") from error
    coordinator = env.get("UNISONO_COORDINATOR")
    return Topology(
        rank, size, local_rank, local_size, node, num_nodes, coordinator, launcher="unisono"
    )
