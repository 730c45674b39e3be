"""What a process asks of the others in a collective, and how requests of several can differ.

Compared are plain values, so that every process comes to the same verdict with the same words.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

JOIN = "join"
RAGGED = ("allgather", "alltoall")
"""Kinds whose tensors may have different numbers of rows."""
_OF_ROWS = (*RAGGED, "reducescatter")
_WITHOUT_JOIN = ("allgather", "alltoall", "broadcast", "reducescatter")
_ADVICE = (
    "Every process must call the same collectives, in the same order, with tensors of the same "
    "types and shapes."
)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a request."""

    name: str
    """For messages only: variables may be numbered differently where they mean the same."""
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """A collective, as one process wants it."""

    kind: str
    name: str = ""
    """As the program gave it, or empty."""
    tensors: tuple[TensorSpec, ...] = ()
    op: str = ""
    root: int | None = None
    scales: tuple[float, float] = (1.0, 1.0)
    problem: str = ""
    """Why this process cannot take part at all."""

    @property
    def title(self) -> str:
        return f"hvd.{self.kind}({self.name!r})" if self.name else f"hvd.{self.kind}()"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "Request":
        tensors = tuple(
            TensorSpec(**{**each, "shape": tuple(each["shape"])}) for each in told["tensors"]
        )
        return cls(**{**told, "tensors": tensors, "scales": tuple(told["scales"])})

    def digest(self) -> str:
        """The same in processes whose requests agree."""
        told = self.to_json()
        told["tensors"] = [[each.dtype, _fixed(each.shape, self.kind)] for each in self.tensors]
        text = json.dumps(told, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def difference(requests: Mapping[int, Request], *, is_joined: bool) -> str | None:
    """Why a collective that ranks ask for cannot be done; None if it can."""
    for rank, request in requests.items():
        if request.problem:
            return f"{request.title} cannot be done by rank {rank}: {request.problem}"
    for find in _DIFFERENCES:
        found = find(requests)
        if found is not None:
            return f"{found} {_ADVICE}"
    first = next(iter(requests.values()))
    if is_joined and first.kind in _WITHOUT_JOIN:
        return (
            f"{first.title} is not possible once a process has called hvd.join(): it has no rows "
            "to give. Call hvd.join() last; sparse gradients need sparse_as_dense=True."
        )
    if first.kind in _OF_ROWS and any(not each.shape for each in first.tensors):
        return f"{first.title} needs tensors with rows; it was given a scalar. Give a list of one."
    return None


def _compare(what: str, read: Callable[[Request], Any], told: str = "{}") -> Callable[..., Any]:
    """Finds the first rank that differs from the lowest in one respect."""

    def find(requests: Mapping[int, Request]) -> str | None:
        (first, reference), *others = requests.items()
        for rank, request in others:
            if read(request) != read(reference):
                mine, theirs = (told.format(read(each)) for each in (reference, request))
                where = f" in {reference.title}" if reference.kind == request.kind else ""
                return f"Mismatched {what}{where}: rank {first} {mine}, rank {rank} {theirs}."
        return None

    return find


def _compare_tensors(requests: Mapping[int, Request]) -> str | None:
    (first, reference), *others = requests.items()
    for rank, request in others:
        for one, other in zip(reference.tensors, request.tensors, strict=True):
            found = _compare_tensor(one, other, first, rank, reference)
            if found is not None:
                return found
    return None


def _compare_tensor(
    one: TensorSpec, other: TensorSpec, first: int, rank: int, request: Request
) -> str | None:
    which = f" of {one.name!r}" if one.name else ""
    if one.dtype != other.dtype:
        what, mine, theirs = "data types", f"gave {one.dtype}", other.dtype
    elif _fixed(one.shape, request.kind) != _fixed(other.shape, request.kind):
        what, mine, theirs = "shapes", f"gave {list(one.shape)}", str(list(other.shape))
    else:
        return None
    where = f"{which} in {request.title}"
    return f"Mismatched {what}{where}: rank {first} {mine}, rank {rank} {theirs}."


def _fixed(shape: Sequence[int], kind: str) -> list[int]:
    """The part of a shape that must agree, with the number of dimensions."""
    return [len(shape), *(shape[1:] if kind in RAGGED else shape)]


_DIFFERENCES = (
    _compare("operations", lambda request: request.kind, "did hvd.{}"),
    _compare("names", lambda request: request.name, "gave {!r}"),
    _compare("numbers of tensors", lambda request: len(request.tensors), "gave {}"),
    _compare_tensors,
    _compare("reduction operations", lambda request: request.op, "gave hvd.{}"),
    _compare("scale factors", lambda request: request.scales, "gave {}"),
    _compare("root ranks", lambda request: request.root, "gave {}"),
)
