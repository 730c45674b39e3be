"""Process groups of torch replicas and their collectives: NCCL on GPUs, gloo on CPUs.

A group is an object of ours, not torch.distributed's default group: that stays free for the user,
and Keras 3.16, which averages gradients once the default group exists, leaves ours alone. Sockets
bind to one address: loopback, unless the processes are on several nodes. Only torch is imported
here: a process joins its run while its import of Keras is still under way.
"""

import atexit
import datetime
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from unisono.backends.gloo_threads import placed_apart
from unisono.errors import PeerLostError, StrategyError
from unisono.launch.client import World, current_world
from unisono.launch.network import interface_of
from unisono.launch.source_filter import OnlyFrom, source_addresses

_TIMEOUT = datetime.timedelta(minutes=10)
_LOOPBACK = "127.0.0.1"
_SMALL_BYTES = 1 << 18
_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
_OPS: dict[str, tuple[Any, Callable[..., torch.Tensor]]] = {
    "sum": (dist.ReduceOp.SUM, torch.add),
    "min": (dist.ReduceOp.MIN, torch.minimum),
    "max": (dist.ReduceOp.MAX, torch.maximum),
    "product": (dist.ReduceOp.PRODUCT, torch.mul),
}
# A sum of booleans is whether any is true, a product whether all are.
_OPS_OF_BOOLEANS = {"sum": "max", "min": "min", "max": "max", "product": "min"}
# Types that gloo cannot compute with, and one that holds all their values.
_WIDER = {
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
_groups: dict[tuple[int, ...], "Group"] = {}


class Group:
    """Processes that compute together, each with a rank."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        device: torch.device,
        *,
        host: str = _LOOPBACK,
    ) -> None:
        """`host`: the address at which the others reach this process."""
        self.rank = rank
        self.size = size
        self.device = device
        self._store = store  # torch does not keep a store alive that is written in Python.
        self._sockets: Any = None
        if device.type == "cpu":
            with placed_apart():
                self._sockets = dist.ProcessGroupGloo.create_device(hostname=host)
        self._group = self._communicator("")
        self._in_background: Any = None

    def _communicator(self, name: str) -> Any:
        store = dist.PrefixStore(name, self._store) if name else self._store
        try:
            if self.device.type == "cuda":
                # A thread of torch would ask the store every second, which may be in Python.
                os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
                return dist.ProcessGroupNCCL(store, self.rank, self.size, _TIMEOUT)
            options = dist.ProcessGroupGloo._Options()
            options._timeout = _TIMEOUT
            options._devices = [self._sockets]
            return dist.ProcessGroupGloo(store, self.rank, self.size, options)
        except RuntimeError as error:
            raise PeerLostError(f"The processes did not find each other: {error}") from error

    def abort(self) -> None:
        """Have collectives return that wait for a process that is gone; from any thread.

        Those of gloo fail by themselves. NCCL's would keep the GPU, and whoever waits for it.
        """
        for each in self._communicators():
            each.abort()

    def close(self) -> None:
        """End the communicators; no collective may follow."""
        for each in self._communicators():
            each.shutdown()

    def _communicators(self) -> list[Any]:
        found = (self._group, self._in_background) if self.device.type == "cuda" else ()
        return [each for each in found if each is not None]

    def start_all_reduce(self, flat: torch.Tensor) -> "PendingReduce":
        """Begin to sum a contiguous tensor over the replicas, in place, and return at once.

        By a communicator of its own: replicas may begin a sum before or after the collectives of
        a layer (a branch that has no gradient on some of them), but not in another order among
        themselves.
        """
        if self._in_background is None:
            self._in_background = self._communicator("background")
        if not self._is_small(flat):
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.SUM
            return PendingReduce(flat, _started(self._in_background.allreduce, [flat], options))
        every = flat.new_empty((self.size, flat.numel()))
        own, result = flat.repeat(self.size).view(torch.uint8), every.view(-1).view(torch.uint8)
        work = _started(self._in_background.alltoall_base, result, own, [], [])
        return PendingReduce(flat, work, every)

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: str = "sum") -> list[torch.Tensor]:
        """Reduce each tensor over the replicas by one of `_OPS`; a collective per data type."""
        results: list[Any] = [None] * len(tensors)
        by_type: dict[torch.dtype, list[int]] = {}
        for i, tensor in enumerate(tensors):
            by_type.setdefault(tensor.dtype, []).append(i)
        for places in by_type.values():
            flat = torch.cat([tensors[i].detach().reshape(-1) for i in places])
            parts = self.all_reduce_flat(flat, op).split([tensors[i].numel() for i in places])
            for i, part in zip(places, parts, strict=True):
                results[i] = part.view(tensors[i].shape)
        return results

    def all_reduce_flat(self, flat: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce one vector over the replicas, which may be overwritten."""
        options = dist.AllreduceOptions()
        options.reduceOp, combine = _OPS[op]
        if self._is_small(flat):
            first, *others = self._exchange(flat.view(torch.uint8)).view(flat.dtype)
            # In rank order, so that every replica gets the same bits.
            return functools.reduce(combine, others, first)
        self._wait(lambda: self._group.allreduce([flat], options))
        return flat

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor of every replica, all of one shape."""
        return list(self.stack(tensor))

    def stack(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all replicas, all of one shape, along a new first axis."""
        own = tensor.detach().contiguous()
        if not own.numel():
            return own.new_empty((self.size, *own.shape))
        # As bytes: gloo cannot gather booleans and some small types.
        data = own.reshape(-1).view(torch.uint8)
        if self._is_small(data):
            every = self._exchange(data)
        else:
            every = data.new_empty(self.size * data.numel())
            self._wait(lambda: self._group._allgather_base(every, data))
        return every.view(-1).view(own.dtype).view(self.size, *own.shape)

    def concatenate(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """The tensors of all replicas joined along an axis, on which they may differ in length."""
        rows = tensor.detach().movedim(axis, 0)
        return torch.cat(self.gather_rows(rows, self.gather_sizes(len(rows)))).movedim(0, axis)

    def gather_sizes(self, size: int) -> list[int]:
        """A number of every replica."""
        return [int(n) for n in self.all_gather(torch.tensor([size], device=self.device))]

    def gather_rows(self, tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """The rows of every replica; replica r has sizes[r] of them."""
        most = max(sizes)
        own = tensor.detach()
        if len(own) < most:
            own = torch.cat([own, own.new_zeros((most - len(own), *own.shape[1:]))])
        parts = self.all_gather(own)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        """Overwrite tensors with those of one replica."""
        with torch.no_grad():
            for tensor in tensors:
                dense = tensor.detach().contiguous()
                data = dense.reshape(-1).view(torch.uint8)
                self._wait(lambda data=data: self._group.broadcast(data, root))  # type: ignore[misc]
                if self.rank != root and dense.data_ptr() != tensor.data_ptr():
                    tensor.copy_(dense)

    def exchange_rows(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """Send `sent[r]` rows to each replica r, in order; the rows received, in replica order."""
        row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        own, every = (x.detach().contiguous().view(-1).view(torch.uint8) for x in (rows, result))
        if row_bytes:
            sizes = [[n * row_bytes for n in counts] for counts in (received, sent)]
            self._wait(lambda: self._group.alltoall_base(every, own, *sizes))
        return result

    def barrier(self) -> None:
        """Return when every replica has reached this call."""
        # Not the group's own: NCCL's guesses the device, and does not block the program.
        self.gather_sizes(0)

    def _is_small(self, data: torch.Tensor) -> bool:
        return bool(self.device.type == "cpu" and self.size * data.nbytes <= _SMALL_BYTES)

    def _exchange(self, data: torch.Tensor) -> torch.Tensor:
        """All replicas' bytes, in one round of messages; gloo's own all-gather takes several."""
        every = data.new_empty(self.size * data.numel())
        self._wait(lambda: self._group.alltoall_base(every, data.repeat(self.size), [], []))
        return every.view(self.size, -1)

    def _wait(self, start: Callable[[], Any]) -> None:
        _finished(_started(start))


class PendingReduce:
    """A sum over replicas that is under way."""

    def __init__(self, flat: torch.Tensor, work: Any, every: torch.Tensor | None = None) -> None:
        """`every`: receives the tensors of all replicas, to be summed here."""
        self._flat = flat
        self._work = work
        self._every = every

    def wait(self) -> None:
        """Have the tensor hold the sum; on a GPU, for what is computed after this call."""
        _finished(self._work)
        if self._every is not None:
            # In rank order, so that every replica gets the same bits.
            self._flat.copy_(functools.reduce(torch.add, self._every))


def _started(start: Callable[..., Any], *args: Any) -> Any:
    try:
        return start(*args)
    except RuntimeError as error:
        raise _lost(error) from error


def _finished(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise _lost(error) from error


def _lost(error: RuntimeError) -> PeerLostError:
    return PeerLostError(f"Another process of the group is gone, or does not answer: {error}")


class TorchCollectives:
    """Eager collectives; see base.Collectives.

    Shapes and types must agree between processes, which the caller checks. Tensors on any device
    are copied to the group's device, and the results back to theirs.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank = group.rank
        self.size = group.size

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
        results: dict[int, torch.Tensor] = {}
        by_op: dict[str, list[int]] = {}
        for i, tensor in enumerate(tensors):
            is_boolean = tensor.dtype == torch.bool
            by_op.setdefault(_OPS_OF_BOOLEANS[op] if is_boolean else op, []).append(i)
        for name, places in by_op.items():
            wide = [self._to_group(tensors[i]) for i in places]
            wide = [tensor.to(_WIDER.get(tensor.dtype, tensor.dtype)) for tensor in wide]
            for i, total in zip(places, self._group.all_reduce(wide, name), strict=True):
                results[i] = total.to(tensors[i])
        return [results[i] for i in range(len(tensors))]

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        own = self._to_group(tensor)
        if own.ndim == 0:
            return [part.to(tensor.device) for part in self._group.all_gather(own)]
        sizes = self._group.gather_sizes(len(own))
        return [part.to(tensor.device) for part in self._group.gather_rows(own, sizes)]

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int) -> list[torch.Tensor]:
        copies = [
            self._to_group(tensor).clone(memory_format=torch.contiguous_format)
            for tensor in tensors
        ]
        self._group.broadcast(copies, root)
        return [copy.to(tensor.device) for copy, tensor in zip(copies, tensors, strict=True)]

    def reduce_scatter(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        # gloo's own needs equal numbers of rows.
        (total,) = self.all_reduce([tensor], op)
        each, more = divmod(len(total), self.size)
        start = self.rank * each + min(self.rank, more)
        return total[start : start + each + (self.rank < more)]

    def all_to_all(
        self, tensor: torch.Tensor, splits: Sequence[int]
    ) -> tuple[torch.Tensor, list[int]]:
        own = self._to_group(tensor)
        every = self._group.all_gather(torch.tensor(list(splits), device=own.device))
        received = [int(sent[self.rank]) for sent in every]
        rows = self._group.exchange_rows(own, splits, received)
        return rows.to(tensor.device), received

    def barrier(self) -> None:
        self._group.barrier()

    def _to_group(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self._group.device)


# -- the processes of a run -----------------------------------------------------------------------


def join(world: World) -> None:
    """Prepare this process for collectives with the others."""
    # NCCL would choose an interface by itself; gloo is given the address.
    if _NCCL_INTERFACE not in os.environ and (interface := interface_of(world.host)):
        os.environ[_NCCL_INTERFACE] = f"={interface}"
    # torchrun and srun show all GPUs to every process, and Keras uses the current one. Setting it
    # starts CUDA, which is for the program to do.
    own = world.topology.local_rank
    if 1 < torch.cuda.device_count() > own:
        torch.cuda._lazy_call(lambda: torch.cuda.set_device(own))


def world_group(ranks: Sequence[int] | None = None) -> Group:
    """The group of all processes of the run, or of some; each of these must call this."""
    world = current_world()
    if world is None:
        raise StrategyError(
            "Asked for collectives between processes, but this one runs alone. Start several with "
            "`unisono run --replicas N script.py`, or with unisono.spawn."
        )
    members = tuple(range(world.size)) if ranks is None else tuple(sorted(set(ranks)))
    if members not in _groups:
        _groups[members] = _make_group(members, world)
    return _groups[members]


@atexit.register
def _close_groups() -> None:
    for group in _groups.values():
        group.close()


def _make_group(members: tuple[int, ...], world: World) -> Group:
    from unisono.backends.torch.devices import default_device

    name = "torch/" + ",".join(map(str, members))
    # An error here names the missing process; torch would wait for minutes and not name it.
    topic = f"collectives of ranks {', '.join(map(str, members))}"
    hosts = world.all_gather(topic, world.host, members)
    sources = source_addresses(world, hosts, members)
    store = RendezvousStore(world, name)
    rank = members.index(world.rank)
    with OnlyFrom(sources, host=world.host):
        return Group(store, rank, len(members), default_device(), host=world.host)


class RendezvousStore(dist.Store):
    """The store of process groups, kept by the run's rendezvous server.

    torch's TCPStore listens on every address and authenticates nobody; the rendezvous server is
    bound to one address and checks the run's secret.
    """

    def __init__(self, world: World, prefix: str) -> None:
        super().__init__()
        self._world = world
        self._prefix = prefix

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._world.put(self._name(key), data)

    def get(self, key: str) -> bytes:
        return self._world.get(self._name(key))

    def add(self, key: str, amount: int) -> int:
        return self._world.add(self._name(key), amount)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:  # type: ignore[override, unused-ignore]
        limit = () if timeout is None else (timeout.total_seconds(),)
        for key in keys:
            self._world.get(self._name(key), *limit)

    def check(self, keys: Sequence[str]) -> bool:
        try:
            self.wait(keys, datetime.timedelta(0))
        except TimeoutError:
            return False
        return True

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"
