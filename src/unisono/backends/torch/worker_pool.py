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
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import torch
import torch.distributed as dist

from unisono.backends.torch.batch_memory import BatchReader, BatchWriter
from unisono.backends.torch.batches import HostArrays, on_host, to_device
from unisono.backends.torch.devices import default_device, generators
from unisono.backends.torch.model_copy import ModelCopy
from unisono.backends.torch.model_pickle import pack, replicated_variables, unpack
from unisono.backends.torch.process_group import Group
from unisono.backends.torch.replica import TorchReplica, count_rows, has_rows, own_rows
from unisono.data.arrays import changing_arrays
from unisono.data.feed import Shard
from unisono.devices import POLICY, Placement, Policy, current_policy
from unisono.errors import PeerLostError, WorkerError
from unisono.hooks import bind, original, unbind
from unisono.launch.channel import Channel, SharedMemory
from unisono.launch.cpu_environment import malloc_environment
from unisono.launch.workers import Workers, WorkerWatch, first_cause, worker_error
from unisono.replication.checksums import own_checksums
from unisono.replication.exact_draws import is_exact
from unisono.replication.introspection import optimizers_of
from unisono.replication.loss_kinds import LossKinds
from unisono.replication.random_state import set_seed
from unisono.replication.step import seed_stride
from unisono.scratch import Scratch, sweep

_START_TIMEOUT_S = 180.0
_ADVICE = {
    "cpu": "The model keeps its values as of the last whole step; call fit again to go on with new "
    "processes.",
    "gpu": "The step under way may have changed some of the model's values; load the last "
    "checkpoint before you call fit again, which starts new processes.",
}
_logger = logging.getLogger("unisono")
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
        self._has_stepped = False
        for name in _CALLS:
            bind(copy.model, name, self._call(name))
        weakref.finalize(copy.model, self._pool.forget, self._number)

    def shard(self, data: Any) -> Shard:
        data = keras.tree.map_structure(on_host, data)
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
            group = self._pool.start(may_restart=not self._has_stepped)
            self._has_stepped = True
            self._send_changes(group)
            num_rows, model = shard.num_rows, self._copy.model
            layout = self._pool.write(shard.data, num_rows)
            kinds = self._copy.replication.kinds(name)
            states = [g.get_state() for g in generators()] if is_exact() else None
            command = ("step", self._number, name, layout, num_rows, model.training, kinds, states)
            self._pool.send(*command)
            rows = own_rows(num_rows, group)
            own = keras.tree.map_structure(
                lambda leaf: to_device(leaf[rows] if has_rows(leaf, num_rows) else leaf), shard.data
            )
            yield own, TorchReplica(group, num_rows)
            self._pool.check()
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
            threads, is_cpu = torch.get_num_threads(), self._placement.kind == "cpu"
            self._has_stepped = self._has_stepped and self._depth > 0
            self._depth += 1
            try:
                if is_cpu:
                    torch.set_num_threads(threads_per_replica(self._placement.num_replicas))
                with contextlib.nullcontext() if is_cpu else changing_arrays(HostArrays):
                    result = original(self._copy.model, name)(*args, **kwargs)
            finally:
                self._depth -= 1
                torch.set_num_threads(threads)
            if not self._depth:
                self._pool.settle()
            return result

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
        copy.buckets.clear()  # Workers begin without.


class WorkerPool:
    """The worker processes of one placement, shared by all models on it."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self.workers: Workers | None = None
        self._group: Group | None = None
        self._watch: WorkerWatch | None = None
        self._rows = BatchWriter(placement.num_replicas, self._hand_over)
        self._scratch: Scratch | None = None
        self._launch()

    @classmethod
    def of(cls, placement: Placement) -> "WorkerPool":
        if placement not in _pools:
            _pools[placement] = cls(placement)
        return _pools[placement]

    def start(self, *, may_restart: bool = True) -> Group:
        """The group of all replicas; workers that have ended are started again, between calls."""
        is_up = self.workers is not None and self.workers.are_alive and not self._has_failed
        if is_up and self._group is not None:
            return self._group
        if not is_up:
            if self.workers is not None:
                if not may_restart:
                    raise PeerLostError("A replica has ended between two steps.")
                ended = first_cause(self.workers, "New processes are started.")
                if not isinstance(ended, WorkerError):
                    raise ended
                _logger.warning("%s", ended)
            self.end(at_once=True)
            self._launch()
        assert self.workers is not None
        for answer in self.workers.receive(_START_TIMEOUT_S):
            if answer != "ready":
                _, data, text = answer
                raise worker_error(1, data, text)
        size = self._placement.num_replicas
        self._group = Group(dist.FileStore(self._store, size), 0, size, default_device())
        # A collective of NCCL with a worker that is gone neither raises nor blocks here.
        self._watch = WorkerWatch(self.workers, self._group.abort)
        return self._group

    def check(self) -> None:
        """Raise PeerLostError when a worker has ended, or has reported an error."""
        if self._has_failed:
            raise PeerLostError("A replica has failed.")

    def settle(self) -> None:
        """Wait for the steps of a call on GPUs, so that what fails in them is its error."""
        if self._placement.kind != "gpu" or self._group is None:
            return
        try:
            torch.cuda.current_stream().synchronize()
            self.check()
        except Exception as error:
            raise self.explain(error) from error.__cause__

    def send(self, *command: Any) -> None:
        """Send a command of `Worker` with its arguments."""
        assert self.workers is not None
        self.workers.send(command)

    def write(self, data: Any, num_rows: int) -> Any:
        """Write the other replicas' rows where workers read them; see batch_memory."""
        return self._rows.write(data, num_rows, self.check)

    def explain(self, error: BaseException) -> BaseException:
        """End all workers after an error; returns the error that caused it."""
        # After an abort, NCCL and CUDA raise errors of their own.
        is_aborted = self._has_failed and isinstance(error, Exception)
        if (is_aborted or isinstance(error, WorkerError)) and self.workers is not None:
            error = first_cause(self.workers, _ADVICE[self._placement.kind])
        self.end(at_once=True)
        return error

    @property
    def _has_failed(self) -> bool:
        return self._watch is not None and self._watch.has_failed

    def forget(self, number: int) -> None:
        """Drop a model in all workers, if they are still there."""
        if self._group is not None and self.workers is not None and self.workers.are_alive:
            with contextlib.suppress(WorkerError):
                self.send("forget", number)

    def end(self, *, at_once: bool = False) -> None:
        if self._watch is not None:
            self._watch.end()
        if self._group is not None:
            (self._group.abort if at_once else self._group.close)()
        if self.workers is not None:
            (self.workers.kill if at_once else self.workers.end)()
        self._rows.close()
        if self._scratch is not None:
            self._scratch.close()
        self.workers = self._group = self._watch = self._scratch = None

    def _launch(self) -> None:
        sweep()
        self._scratch = Scratch()
        self._store = str(self._scratch.path / "store")
        size = self._placement.num_replicas
        envs = [_worker_environment(self._placement, rank) for rank in range(1, size)]
        self.workers = Workers("unisono.backends.torch.worker", size, [self._store], envs)

    def _hand_over(self, memory: SharedMemory) -> None:
        assert self.workers is not None
        self.send("memory")
        for worker in self.workers:
            worker.channel.send_memory(memory)


class Worker:
    """The other side: the commands that a replica's process runs, one method each."""

    def __init__(self, channel: Channel, rank: int, size: int, store: str) -> None:
        self._channel = channel
        self._reader: BatchReader | None = None
        self._copies: dict[int, ModelCopy] = {}
        channel.send("ready")
        self._group = Group(dist.FileStore(store, size), rank, size, default_device())

    def serve(self) -> None:
        while True:
            command, *arguments = self._channel.receive()
            getattr(self, f"do_{command}")(*arguments)

    def do_memory(self) -> None:
        memory = self._channel.receive_memory()
        self._reader = BatchReader(memory, self._group.rank, self._group.size)

    def do_model(self, number: int, data: bytes, sync_batch_norm: bool, seed: int) -> None:
        model, variables = unpack(data)
        self._copies[number] = ModelCopy(model, sync_batch_norm=sync_batch_norm)
        self._copies[number].changes.watch(variables)
        set_seed((seed + self._group.rank * seed_stride()) % 2**31)

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
        states: list[Any] | None,
    ) -> None:
        for generator, state in zip(generators(), states or (), strict=False):
            generator.set_state(state)
        copy = self._copies[number]
        assert self._reader is not None
        if kinds is not None:
            copy.replication.learn(name, kinds)
        rows = own_rows(num_rows, self._group)
        data = self._reader.read(layout, rows)
        if copy.model.training != training:
            copy.model.train(training)
        with torch.set_grad_enabled(name == "train_step"):
            copy.run_step(name, data, TorchReplica(self._group, num_rows))


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
