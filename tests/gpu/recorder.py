"""Records what a step of torch does: kernels, collectives, and whatever would have the host wait.

On CPUs nothing waits for a device, so a number or a list that becomes a tensor is recorded as the
copy to a GPU that it would be, and reading a tensor's value as the wait that it would be.
"""

import contextlib
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# They allocate, or give a tensor another shape, and launch nothing.
_NO_KERNEL = {
    *("aten::detach", "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::alias"),
    *("aten::new_empty", "aten::new_empty_strided", "aten::lift_fresh", "aten::_unsafe_view"),
    *("aten::record_stream", "aten::_local_scalar_dense", "aten::_pin_memory", "aten::pin_memory"),
}
_FROM_HOST = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy)
_COLLECTIVES = ("allreduce", "allgather", "_allgather_base", "alltoall_base", "broadcast")


@dataclass(frozen=True)
class Collective:
    """One collective of a step."""

    op: str
    num_bytes: int
    """What this replica contributes."""
    phase: str
    at_s: float
    group: int
    """The communicator, numbered by first use."""


@dataclass
class Record:
    """What one step did, by phase: "forward", "backward" and "update"."""

    kernels: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    """By kind and by the line of ours or of Keras that asked for it."""
    collectives: list[Collective] = field(default_factory=list)
    device: str = "cpu"
    """The type of the device that tensors are on."""
    phase: str = "forward"
    backward_s: tuple[float, float] = (0.0, 0.0)

    @property
    def num_waits(self) -> int:
        return sum(self.waits.values())

    def note_wait(self, kind: str) -> None:
        ours = [f for f in traceback.extract_stack() if _is_on_path(f.filename)]
        place = "?"
        if ours:
            place = "/".join(ours[-1].filename.split("/")[-2:]) + f":{ours[-1].lineno}"
        self.waits[f"{kind} at {place}"] += 1

    def of_new_groups(self, phase: str) -> list[Collective]:
        """The collectives of communicators that were first used in a phase."""
        first = {c.group: c.phase for c in reversed(self.collectives)}
        return [c for c in self.collectives if first[c.group] == phase]

    def fraction_of_backward(self, collective: Collective) -> float:
        """When a collective began, as a fraction of the backward pass."""
        begin, end = self.backward_s
        return (collective.at_s - begin) / (end - begin)


@contextlib.contextmanager
def recording(device: str = "cpu") -> Iterator[Record]:
    """Record what this thread does inside: one step, or one batch."""
    record = Record(device=device)
    with _collectives(record), _Calls(record), _Kernels(record):
        yield record


class _Kernels(TorchDispatchMode):
    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        record = self._record
        if not func.is_view and name not in _NO_KERNEL:
            record.kernels[record.phase] += 1
        if name == "aten::_local_scalar_dense" and args[0].device.type == record.device:
            record.note_wait("reads a value")
        elif name == "aten::equal":
            record.note_wait("compares values")
        out = func(*args, **kwargs)
        if name in ("aten::_to_copy", "aten::copy_"):
            source = args[0] if name == "aten::_to_copy" else args[1]
            self._note_copy(source, out, kwargs.get("non_blocking") or args[2:3] == (True,))
        return out

    def _note_copy(self, source: Any, out: Any, is_async: bool) -> None:
        if not isinstance(source, torch.Tensor) or source.device.type == out.device.type:
            return
        if not is_async:
            self._record.note_wait(f"copies {source.device.type} to {out.device.type}")


class _Calls(TorchFunctionMode):
    """Sees calls of torch's own functions: backward passes, and tensors from the host's values."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        record = self._record
        if func is torch.Tensor.backward:
            return self._backward(lambda: func(*args, **kwargs))
        if record.device == "cpu" and func in _FROM_HOST and _is_value(args[0]):
            record.note_wait("sends a value")
        return func(*args, **kwargs)

    def _backward(self, run: Callable[[], Any]) -> Any:
        record, begin = self._record, time.monotonic()
        record.phase = "backward"
        try:
            return run()
        finally:
            record.backward_s = (begin, time.monotonic())
            record.phase = "update"


@contextlib.contextmanager
def _collectives(record: Record) -> Iterator[None]:
    """Record the calls of the process group that torch has here."""
    kinds = [getattr(dist, name, None) for name in ("ProcessGroupGloo", "ProcessGroupNCCL")]
    groups: dict[int, int] = {}
    patched = [
        (kind, op, vars(kind).get(op)) for kind in filter(None, kinds) for op in _COLLECTIVES
    ]
    for kind, op, _ in patched:
        setattr(kind, op, _recorded(record, op, getattr(kind, op), groups))
    try:
        yield
    finally:
        for kind, op, own in patched:
            if own is None:
                delattr(kind, op)
            else:
                setattr(kind, op, own)


def _recorded(
    record: Record, op: str, plain: Callable[..., Any], groups: dict[int, int]
) -> Callable[..., Any]:
    def call(group: Any, *args: Any) -> Any:
        # The own tensor comes last where there is another for the result.
        own = args[1] if op in ("allgather", "_allgather_base", "alltoall_base") else args[0]
        own = own[0] if isinstance(own, (list, tuple)) else own
        num_bytes = own.numel() * own.element_size()
        if op == "alltoall_base":
            num_bytes //= group.size()  # It sends the same to each.
        number = groups.setdefault(id(group), len(groups))
        found = Collective(op, num_bytes, record.phase, time.monotonic(), number)
        record.collectives.append(found)
        return plain(group, *args)

    return call


def _is_value(value: Any) -> bool:
    """A number or a list, not an array of a batch, which has to be sent."""
    return len(getattr(value, "shape", ())) == 0 and not isinstance(value, torch.Tensor)


def _is_on_path(file: str) -> bool:
    if file.endswith(("gpu/recorder.py", "gpu/fake_cuda.py")):
        return False
    return "/unisono/" in file or "/keras/src/" in file or "/tests/" in file
