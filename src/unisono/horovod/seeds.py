"""Random numbers of each process' own, as programs for Horovod expect them.

The processes of a run begin with one seed, so that `parallel` shuffles the global batches of all
alike. With Horovod's interface each process shuffles data of its own, and all of them taking the
same batches would make every step the step of one.
"""

from unisono.launch.client import current_world
from unisono.replication.random_state import set_seed

_STRIDE = 1_000_003


def seed_processes() -> None:
    """Give this process a seed of its own; a program that sets seeds itself does so later."""
    world = current_world()
    if world is not None:
        set_seed((world.seed + world.rank * _STRIDE) % 2**31)
