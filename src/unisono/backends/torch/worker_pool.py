"""The processes of the other torch replicas, seen from the first: started, fed and ended.

One team per placement serves every model on it and is started again when it has ended. Rows of a
batch are written once into memory that all processes see; only their place in it is sent.
"""

import atexit
import contextlib
import dataclasses
import os
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import torch
import torch.distributed as dist

from unisono.backends.torch.devices import default_device
from unisono.backends.torch.process_group import Group
from unisono.devices import POLICY, Placement, Policy, current_policy
from unisono.errors import WorkerError
from unisono.launch.channel import SharedMemory
from unisono.launch.cpu_environment import malloc_environment
from unisono.launch.workers import Workers, first_cause, worker_error
from unisono.scratch import Scratch, sweep

_START_TIMEOUT_S = 180.0
_ALIGNMENT = 64
_teams: dict[Placement, "Team"] = {}


class Team:
    """The worker processes of one placement, shared by all models on it."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self.workers: Workers | None = None
        self._group: Group | None = None
        self._memory: SharedMemory | None = None
        self._half = 0
        self._scratch: Scratch | None = None
        self._begin()

    @classmethod
    def of(cls, placement: Placement) -> "Team":
        if placement not in _teams:
            _teams[placement] = cls(placement)
        return _teams[placement]

    def start(self) -> Group:
        """The group of all replicas; workers are started again if they have ended."""
        if self._group is not None and self.workers is not None and self.workers.are_alive:
            return self._group
        if self.workers is None or not self.workers.are_alive:
            self.end()
            self._begin()
        assert self.workers is not None
        for answer in self.workers.receive(_START_TIMEOUT_S):
            if answer != "ready":
                _, data, text = answer
                raise worker_error(1, data, text)
        size = self._placement.num_replicas
        store = dist.FileStore(self._store, size)
        self._group = Group(store, 0, size, default_device())
        return self._group

    def tell(self, *command: Any) -> None:
        assert self.workers is not None
        self.workers.send(command)

    def share(self, data: Any, num_rows: int) -> Any:
        """Write the other replicas' rows into shared memory; says what lies where."""
        leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
        needed = sum(leaf.numel() * leaf.element_size() + _ALIGNMENT for leaf in leaves)
        if self._memory is None or 2 * needed > self._memory.num_bytes:
            self._give_memory(4 * needed)
        memory = self._memory
        assert memory is not None
        # In turns: workers may still read the rows of the step before.
        self._half = 1 - self._half
        offset = self._half * (memory.num_bytes // 2)
        first = num_rows // self._placement.num_replicas

        def write(leaf: Any) -> Any:
            nonlocal offset
            if leaf is None:
                return None
            offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
            place = Place(offset, tuple(leaf.shape), leaf.dtype, is_split(leaf, num_rows))
            offset += leaf.numel() * leaf.element_size()
            view, source = place.view(memory), leaf.detach()
            if place.is_split:
                view, source = view[first:], source[first:]
            view.copy_(source)
            return place

        return keras.tree.map_structure(write, data)

    def explain(self, error: BaseException) -> BaseException:
        """End all workers after an error; the error that started it."""
        if isinstance(error, WorkerError) and self.workers is not None:
            error = first_cause(
                self.workers,
                "The model keeps its values as of the last whole step; call fit again to go on "
                "with new processes.",
            )
        self.end(at_once=True)
        return error

    def forget(self, number: int) -> None:
        """Drop a model in all workers, if they can still be told."""
        if self._group is not None and self.workers is not None and self.workers.are_alive:
            with contextlib.suppress(WorkerError):
                self.tell("forget", number)

    def end(self, *, at_once: bool = False) -> None:
        if self.workers is not None:
            (self.workers.kill if at_once else self.workers.end)()
        self.workers = None
        self._group = None
        if self._memory is not None:
            self._memory.close()
        self._memory = None
        if self._scratch is not None:
            self._scratch.close()
        self._scratch = None

    def _begin(self) -> None:
        sweep()
        self._scratch = Scratch()
        self._store = str(self._scratch.path / "store")
        count = self._placement.num_replicas
        self.workers = Workers(
            "unisono.backends.torch.worker",
            count,
            [self._store],
            [worker_environment(self._placement, rank) for rank in range(1, count)],
        )

    def _give_memory(self, num_bytes: int) -> None:
        assert self.workers is not None
        if self._memory is not None:
            self._memory.close()
        self._memory = SharedMemory.create(num_bytes)
        self.tell("memory")
        for worker in self.workers:
            worker.channel.send_memory(self._memory)


@dataclass(frozen=True)
class Place:
    """Where a tensor of the global batch lies in shared memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_split: bool
    """Whether it has one row a sample, of which a replica reads its own."""

    def view(self, memory: SharedMemory) -> torch.Tensor:
        count = int(np.prod(self.shape, dtype=np.int64))
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory.buffer, dtype=self.dtype, count=count, offset=self.offset)
        return flat.view(self.shape)


def is_split(leaf: torch.Tensor, num_rows: int) -> bool:
    return leaf.ndim > 0 and len(leaf) == num_rows


def threads_per_replica(num_replicas: int) -> int:
    """A CPU replica's share of the cores, and no more than a policy allows a process."""
    share = max(1, len(os.sched_getaffinity(0)) // num_replicas)
    return min(share, current_policy().cpu_threads or share)


def has_started() -> bool:
    """Whether worker processes were started, with the policy that was in force."""
    return bool(_teams)


def worker_environment(placement: Placement, rank: int) -> dict[str, str]:
    env = {"KERAS_BACKEND": "torch"}
    threads = threads_per_replica(placement.num_replicas)
    if placement.kind == "gpu":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        index = placement.indices[rank]
        env["CUDA_VISIBLE_DEVICES"] = visible[index] if visible != [""] else str(index)
    else:
        env["OMP_NUM_THREADS"] = str(threads)
        env |= malloc_environment(os.environ)
    if current_policy() != Policy():
        # What is in force here holds in every process; which GPU it has is said above.
        policy = dataclasses.replace(current_policy(), gpus=None)
        if policy.cpu_threads and placement.kind == "cpu":
            policy = dataclasses.replace(policy, cpu_threads=threads)
        env[POLICY] = policy.to_text()
    return env


@atexit.register
def _end_all_teams() -> None:
    for team in _teams.values():
        team.end()
