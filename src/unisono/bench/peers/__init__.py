"""Other ways to train on several devices, written as their documentation advises.

A peer runs in one process for all replicas, or in one pinned process per replica. The limit of a
backend is an expert's hand-written loop without Keras on the same net.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unisono.bench.peers import jax_peers, tensorflow_peers, torch_peers


@dataclass(frozen=True)
class Peer:
    """One of these ways."""

    backend: str
    title: str
    start: Callable[[str, int, int], Any]
    """`start(net, num_steps, num_replicas)` makes a function that trains one pass."""
    has_processes: bool
    package: str | None = None
    """The package that it needs, beside the backend."""
    is_limit: bool = False

    @property
    def is_installed(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package) is not None


PEERS = {
    "distribution": Peer(
        "jax", "keras.distribution.DataParallel", jax_peers.data_parallel, has_processes=False
    ),
    "shard_map": Peer(
        "jax",
        "the limit: JAX shard_map, no Keras",
        jax_peers.shard_map,
        has_processes=True,
        is_limit=True,
    ),
    "mirrored": Peer(
        "tensorflow",
        "tf.distribute.MirroredStrategy",
        tensorflow_peers.mirrored,
        has_processes=False,
    ),
    "multiworker": Peer(
        "tensorflow",
        "MultiWorkerMirroredStrategy, custom loop",
        tensorflow_peers.multi_worker,
        has_processes=True,
    ),
    "bare_multiworker": Peer(
        "tensorflow",
        "the limit: MultiWorkerMirrored, no Keras",
        tensorflow_peers.bare_multi_worker,
        has_processes=True,
        is_limit=True,
    ),
    "keras_ddp": Peer(
        "torch", "Keras, all-reduce by hand", torch_peers.keras_all_reduce, has_processes=True
    ),
    "raw_ddp": Peer(
        "torch",
        "the limit: torch DDP, no Keras",
        torch_peers.raw_ddp,
        has_processes=True,
        is_limit=True,
    ),
    "lightning": Peer(
        "torch", "PyTorch Lightning", torch_peers.lightning, has_processes=True, package="lightning"
    ),
    "accelerate": Peer(
        "torch", "Accelerate", torch_peers.accelerate, has_processes=True, package="accelerate"
    ),
}
