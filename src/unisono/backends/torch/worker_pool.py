"""The worker processes of the other torch replicas, started, fed and ended by the first one.

One pool per placement serves every model on it, and is started again when its workers have ended.
Rows of a batch are written once into memory that all processes map; only their place in it is sent.
The first process alone iterates the data and runs callbacks, and its values are the ones that
count: what it changed since the last step (a callback, a batch too small to split) is broadcast
before the next one.
"""

import atexit
import contextlib
import dataclasses
import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import torch
import torch.distributed as dist

from unisono.backends.torch.devices import as_tensor, default_device
from unisono.backends.torch.model_copy import ModelCopy
from unisono.backends.torch.model_pickle import pack, replicated_variables, unpack
from unisono.backends.torch.process_group import Group
from unisono.backends.torch.replica import TorchReplica, count_rows, has_rows, own_rows
from unisono.data.feed import Shard
from unisono.devices import POLICY, Placement, Policy, current_policy
from unisono.errors import WorkerError
from unisono.hooks import bind, original, unbind
from unisono.launch.channel import Channel, SharedMemory
from unisono.launch.cpu_environment import malloc_environment
from unisono.launch.workers import Workers, first_cause, worker_error
from unisono.replication.checksums import own_checksums
from unisono.replication.introspection import optimizers_of
from unisono.replication.loss_kinds import LossKinds
from unisono.replication.random_state import set_seed
from unisono.replication.step import SEED_STRIDE
from unisono.scratch import Scratch, sweep

_START_TIMEOUT_S = 180.0
_ALIGNMENT = 64
_CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_pools: dict[Placement, "WorkerPool"] = {}
_numbers = itertools.count()


class WorkerPeers:
    """The workers as the other replicas of one model; see trainer.Peers."""

    feed = None

    def __init__(self, copy: ModelCopy, placement: Placement) -> None:
        self._copy = copy
        self._placement = placement
        self._number = next(_numbers)
        self._pool = WorkerPool.of(placement)
        self._sent: bytes | None = None
        self._sent_to: Workers | None = None
        self._may_differ = True
        self._key: Any = None
        self._depth = 0
        for name in _CALLS:
            bind(copy.model, name, self._call(name))
        weakref.finalize(copy.model, self._pool.forget, self._number)

    def shard(self, data: Any) -> Shard:
        data = keras.tree.map_structure(as_tensor, data)
        return Shard(data, count_rows(data), False, 0)

    def can_join(self, shard: Shard) -> bool:
        # Too few rows for all, or a model that its first call builds: what this replica computes
        # alone is exact, and what it changes is sent before the next step.
        is_built = self._sent is not None or self._copy.is_built
        return shard.num_rows >= self._placement.num_replicas and is_built

    def agree_on_kinds(self, name: str, kinds: LossKinds) -> LossKinds:
        return kinds  # Workers get them with the step.

    @contextlib.contextmanager
    def step(self, name: str, shard: Shard) -> Iterator[tuple[Any, TorchReplica]]:
        try:
            group = self._pool.start()
            self._send_changes(group)
            num_rows, model = shard.num_rows, self._copy.model
            layout = self._pool.write(shard.data, num_rows)
            kinds = self._copy.replication.kinds(name)
            self._pool.send("step", self._number, name, layout, num_rows, model.training, kinds)
            rows = own_rows(num_rows, group)
            own = keras.tree.map_structure(
                lambda leaf: leaf[rows] if has_rows(leaf, num_rows) else leaf, shard.data
            )
            yield own, TorchReplica(group, num_rows)
        except BaseException as error:
            raise self._pool.explain(error) from error.__cause__

    def settle(self, when: str) -> None:
        """Workers get changed values before the next step."""

    def was_built(self) -> None:
        """The next step compares what the model consists of."""

    def checksums(self) -> list[list[int]]:
        own = own_checksums(self._copy.model)
        if self._sent is None:
            return [own]  # The others get their copies at the first step.
        group = self._pool.start()
        self._send_changes(group)
        self._pool.send("checksums", self._number)
        return [one.tolist() for one in group.all_gather(torch.tensor(own, device=group.device))]

    def release(self) -> None:
        unbind(self._copy.model, *_CALLS)
        self._pool.forget(self._number)

    def _call(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Anything on the model may have been changed since the last call.
            is_outermost = self._depth == 0 and name in ("fit", "evaluate", "predict")
            self._may_differ = self._may_differ or is_outermost
            threads = torch.get_num_threads()
            self._depth += 1
            try:
                if self._placement.kind == "cpu":
                    torch.set_num_threads(threads_per_replica(self._placement.num_replicas))
                return original(self._copy.model, name)(*args, **kwargs)
            finally:
                self._depth -= 1
                torch.set_num_threads(threads)

        return call

    def _send_changes(self, group: Group) -> None:
        model = self._copy.model
        optimizers = list(optimizers_of(model))  # Empty until it is compiled.
        parts = (*optimizers, model._compile_loss, model._compile_metrics)
        is_built = all(optimizer.built for optimizer in optimizers)
        key = (self._pool.workers, is_built, *(id(part) for part in parts))
        if self._may_differ or key != self._key:
            self._send_model()
            self._key, self._may_differ = key, False
        places = self._copy.changes.changed()
        if places:
            self._pool.send("values", self._number, places)
            self._copy.follow_first(group, places)

    def _send_model(self) -> None:
        copy = self._copy
        copy.replication.prepare()
        data = pack(copy.model)
        copy.changes.watch(replicated_variables(copy.model))
        if data == self._sent and self._sent_to is self._pool.workers:
            return
        seed = torch.initial_seed() % 2**31
        self._pool.send("model", self._number, data, copy.sync_batch_norm, seed)
        self._sent, self._sent_to = data, self._pool.workers
        copy.changes.forget()


class WorkerPool:
    """The worker processes of one placement, shared by all models on it."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self.workers: Workers | None = None
        self._group: Group | None = None
        self._memory: SharedMemory | None = None
        self._half = 0
        self._scratch: Scratch | None = None
        self._launch()

    @classmethod
    def of(cls, placement: Placement) -> "WorkerPool":
        if placement not in _pools:
            _pools[placement] = cls(placement)
        return _pools[placement]

    def start(self) -> Group:
        """The group of all replicas; workers are started again if they have ended."""
        if self._group is not None and self.workers is not None and self.workers.are_alive:
            return self._group
        if self.workers is None or not self.workers.are_alive:
            self.end()
            self._launch()
        assert self.workers is not None
        for answer in self.workers.receive(_START_TIMEOUT_S):
            if answer != "ready":
                _, data, text = answer
                raise worker_error(1, data, text)
        size = self._placement.num_replicas
        self._group = Group(dist.FileStore(self._store, size), 0, size, default_device())
        return self._group

    def send(self, *command: Any) -> None:
        """Send a command of `Worker` with its arguments."""
        assert self.workers is not None
        self.workers.send(command)

    def write(self, data: Any, num_rows: int) -> Any:
        """Write the other replicas' rows into shared memory; returns a `Place` for each tensor."""
        leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
        needed = sum(leaf.numel() * leaf.element_size() + _ALIGNMENT for leaf in leaves)
        if self._memory is None or 2 * needed > self._memory.num_bytes:
            self._send_memory(4 * needed)
        memory = self._memory
        assert memory is not None
        # Halves in turn: workers may still read the rows of the step before.
        self._half = 1 - self._half
        offset = self._half * (memory.num_bytes // 2)
        first = num_rows // self._placement.num_replicas

        def write(leaf: Any) -> Any:
            nonlocal offset
            if leaf is None:
                return None
            offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
            place = Place(offset, tuple(leaf.shape), leaf.dtype, has_rows(leaf, num_rows))
            offset += leaf.numel() * leaf.element_size()
            view, source = place.view(memory), leaf.detach()
            if place.is_split:
                view, source = view[first:], source[first:]
            view.copy_(source)
            return place

        return keras.tree.map_structure(write, data)

    def explain(self, error: BaseException) -> BaseException:
        """End all workers after an error; returns the error that caused it."""
        if isinstance(error, WorkerError) and self.workers is not None:
            error = first_cause(
                self.workers,
                "The model keeps its values as of the last whole step; call fit again to go on "
                "with new processes.",
            )
        self.end(at_once=True)
        return error

    def forget(self, number: int) -> None:
        """Drop a model in all workers, if they are still there."""
        if self._group is not None and self.workers is not None and self.workers.are_alive:
            with contextlib.suppress(WorkerError):
                self.send("forget", number)

    def end(self, *, at_once: bool = False) -> None:
        if self.workers is not None:
            (self.workers.kill if at_once else self.workers.end)()
        for resource in (self._memory, self._scratch):
            if resource is not None:
                resource.close()
        self.workers = self._group = self._memory = self._scratch = None

    def _launch(self) -> None:
        sweep()
        self._scratch = Scratch()
        self._store = str(self._scratch.path / "store")
        size = self._placement.num_replicas
        envs = [_worker_environment(self._placement, rank) for rank in range(1, size)]
        self.workers = Workers("unisono.backends.torch.worker", size, [self._store], envs)

    def _send_memory(self, num_bytes: int) -> None:
        assert self.workers is not None
        if self._memory is not None:
            self._memory.close()
        self._memory = SharedMemory.create(num_bytes)
        self.send("memory")
        for worker in self.workers:
            worker.channel.send_memory(self._memory)


class Worker:
    """The other side: the commands that a replica's process runs, one method each."""

    def __init__(self, channel: Channel, rank: int, size: int, store: str) -> None:
        self._channel = channel
        self._memory: SharedMemory | None = None
        self._copies: dict[int, ModelCopy] = {}
        channel.send("ready")
        self._group = Group(dist.FileStore(store, size), rank, size, default_device())

    def serve(self) -> None:
        while True:
            command, *arguments = self._channel.receive()
            getattr(self, f"do_{command}")(*arguments)

    def do_memory(self) -> None:
        self._memory = self._channel.receive_memory()

    def do_model(self, number: int, data: bytes, sync_batch_norm: bool, seed: int) -> None:
        model, variables = unpack(data)
        self._copies[number] = ModelCopy(model, sync_batch_norm=sync_batch_norm)
        self._copies[number].changes.watch(variables)
        set_seed((seed + self._group.rank * SEED_STRIDE) % 2**31)

    def do_forget(self, number: int) -> None:
        self._copies.pop(number, None)

    def do_values(self, number: int, places: list[int]) -> None:
        self._copies[number].follow_first(self._group, places)

    def do_checksums(self, number: int) -> None:
        own = own_checksums(self._copies[number].model)
        self._group.all_gather(torch.tensor(own, device=self._group.device))

    def do_step(
        self,
        number: int,
        name: str,
        layout: Any,
        num_rows: int,
        training: bool,
        kinds: LossKinds | None,
    ) -> None:
        copy, memory = self._copies[number], self._memory
        assert memory is not None
        if kinds is not None:
            copy.replication.learn(name, kinds)
        rows = own_rows(num_rows, self._group)
        data = keras.tree.map_structure(
            lambda place: None if place is None else place.read(memory, rows), layout
        )
        if copy.model.training != training:
            copy.model.train(training)
        with torch.set_grad_enabled(name == "train_step"):
            copy.run_step(name, data, TorchReplica(self._group, num_rows))


@dataclass(frozen=True)
class Place:
    """Where a tensor of the global batch lies in shared memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_split: bool
    """Whether it has one row per sample, of which a replica reads its own."""

    def view(self, memory: SharedMemory) -> torch.Tensor:
        count = int(np.prod(self.shape, dtype=np.int64))
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory.buffer, dtype=self.dtype, count=count, offset=self.offset)
        return flat.view(self.shape)

    def read(self, memory: SharedMemory, rows: slice) -> torch.Tensor:
        view = self.view(memory)
        # A copy: the memory is written again two steps later, and a layer may keep its input.
        return (view[rows] if self.is_split else view).clone().to(default_device())


def threads_per_replica(num_replicas: int) -> int:
    """Threads of a CPU replica: its part of the cores, and no more than the policy allows."""
    cores = max(1, len(os.sched_getaffinity(0)) // num_replicas)
    return min(cores, current_policy().cpu_threads or cores)


def has_started() -> bool:
    """Whether worker processes were started, with the policy that was in force."""
    return bool(_pools)


def _worker_environment(placement: Placement, rank: int) -> dict[str, str]:
    env = {"KERAS_BACKEND": "torch"}
    threads = threads_per_replica(placement.num_replicas)
    if placement.kind == "gpu":
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
        index = placement.indices[rank]
        env["CUDA_VISIBLE_DEVICES"] = visible[index] if visible != [""] else str(index)
    else:
        env["OMP_NUM_THREADS"] = str(threads)
        env |= malloc_environment(os.environ)
    if current_policy() != Policy():
        # The policy of this process applies to all; the GPU of each is chosen above.
        policy = dataclasses.replace(current_policy(), gpus=None)
        if policy.cpu_threads and placement.kind == "cpu":
            policy = dataclasses.replace(policy, cpu_threads=threads)
        env[POLICY] = policy.to_text()
    return env


@atexit.register
def _end_all_pools() -> None:
    for pool in _pools.values():
        pool.end()
