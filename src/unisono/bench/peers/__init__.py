"""What others offer for the same job, written as their own documentation advises.

Each peer has a name, a backend, and how its processes are started: one for all replicas, or one
pinned to its cores for each.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unisono.bench.peers import jax_peers, tensorflow_peers, torch_peers


@dataclass(frozen=True)
class Peer:
    """Another way to train on several devices."""

    backend: str
    title: str
    start: Callable[[str, int, int], Any]
    """`start(net, num_steps, num_replicas)` makes a function that trains one pass."""
    has_processes: bool
    package: str | None = None
    """What must be installed for it, beside the backend."""

    @property
    def is_installed(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package) is not None


PEERS = {
    "distribution": Peer(
        "jax", "keras.distribution.DataParallel", jax_peers.data_parallel, has_processes=False
    ),
    "mirrored": Peer(
        "tensorflow",
        "tf.distribute.MirroredStrategy",
        tensorflow_peers.mirrored,
        has_processes=False,
    ),
    "multiworker": Peer(
        "tensorflow",
        "MultiWorkerMirroredStrategy, own loop",
        tensorflow_peers.multi_worker,
        has_processes=True,
    ),
    "keras_ddp": Peer(
        "torch", "Keras, all-reduce by hand", torch_peers.keras_all_reduce, has_processes=True
    ),
    "raw_ddp": Peer("torch", "torch + DDP, no Keras", torch_peers.raw_ddp, has_processes=True),
    "lightning": Peer(
        "torch", "PyTorch Lightning", torch_peers.lightning, has_processes=True, package="lightning"
    ),
    "accelerate": Peer(
        "torch", "Accelerate", torch_peers.accelerate, has_processes=True, package="accelerate"
    ),
}
