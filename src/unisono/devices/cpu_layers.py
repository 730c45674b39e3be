"""Which faster CPU computations of layers a process uses.

Cheaper computations of the same layer on CPUs (`backends/*/cpu_layers.py`) are not parallelism, so
only processes that `unisono run`, `train` or `spawn` started on CPUs use them: `parallel` in a
user's own process computes what plain Keras computes. `UNISONO_CPU_LAYERS=0` switches them off
everywhere; a comma-separated list of names leaves only these on.
"""

import os

from unisono.devices.choice import Placement
from unisono.topology import topology

SWITCH = "UNISONO_CPU_LAYERS"


def chosen_cpu_layers(placement: Placement, known: frozenset[str]) -> frozenset[str]:
    """The names, of those a backend knows, whose layers are replaced in this process."""
    if placement.kind != "cpu" or topology().launcher != "unisono":
        return frozenset()
    switch = os.environ.get(SWITCH, "").strip()
    if switch == "0":
        return frozenset()
    return known & set(switch.split(",")) if switch not in ("", "1") else known
