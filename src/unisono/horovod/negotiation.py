"""Before each collective, the processes compare what they are about to do.

So a difference is an error with the same message in all of them, and no process enters a collective
that the others never call. Usually a request is sent as a checksum, and in full only if checksums
differ or if a process that has joined must know what to contribute zeros for.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from unisono.errors import UnisonoError
from unisono.horovod import timeline
from unisono.horovod.frameworks import framework
from unisono.horovod.session import ProcessSet, session, world_of_session
from unisono.launch.client import World

JOIN = "join"
RAGGED = ("allgather", "alltoall")
"""Collectives whose tensors may differ in their number of rows."""
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
    """For messages only: the same variable may have another number in another process."""
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class CollectiveRequest:
    """A collective as one process requests it."""

    kind: str
    name: str = ""
    """The `name` argument, or empty."""
    tensors: tuple[TensorSpec, ...] = ()
    op: str = ""
    root: int | None = None
    scales: tuple[float, float] = (1.0, 1.0)
    problem: str = ""
    """What is wrong with this process' arguments."""

    @property
    def title(self) -> str:
        return f"hvd.{self.kind}({self.name!r})" if self.name else f"hvd.{self.kind}()"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "CollectiveRequest":
        tensors = tuple(
            TensorSpec(**{**each, "shape": tuple(each["shape"])}) for each in data["tensors"]
        )
        return cls(**{**data, "tensors": tensors, "scales": tuple(data["scales"])})

    def digest(self) -> str:
        """Equal for requests that agree."""
        data = self.to_json()
        data["tensors"] = [[each.dtype, _fixed(each.shape, self.kind)] for each in self.tensors]
        text = json.dumps(data, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def difference(requests: Mapping[int, CollectiveRequest], *, is_joined: bool) -> str | None:
    """Why the requested collective is not possible; None if it is."""
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


def _compare(
    what: str, read: Callable[[CollectiveRequest], Any], text: str = "{}"
) -> Callable[..., Any]:
    """A function that finds the first rank whose request differs from the lowest rank's."""

    def find(requests: Mapping[int, CollectiveRequest]) -> str | None:
        (first, reference), *others = requests.items()
        for rank, request in others:
            if read(request) != read(reference):
                mine, theirs = (text.format(read(each)) for each in (reference, request))
                where = f" in {reference.title}" if reference.kind == request.kind else ""
                return f"Mismatched {what}{where}: rank {first} {mine}, rank {rank} {theirs}."
        return None

    return find


def _compare_tensors(requests: Mapping[int, CollectiveRequest]) -> str | None:
    (first, reference), *others = requests.items()
    for rank, request in others:
        for one, other in zip(reference.tensors, request.tensors, strict=True):
            found = _compare_tensor(one, other, first, rank, reference)
            if found is not None:
                return found
    return None


def _compare_tensor(
    one: TensorSpec, other: TensorSpec, first: int, rank: int, request: CollectiveRequest
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
    """The dimensions that must agree, and their number."""
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


_TOPIC = "a collective of unisono.horovod"


@dataclass(frozen=True)
class Agreement:
    """What all processes of a set are about to execute."""

    request: CollectiveRequest
    notes: list[Any]
    """What each process of the set passed along with its request."""
    last_to_join: int | None = None
    """The last rank to join, if all have joined."""


@dataclass
class _Course:
    """The previous collective of a process set, for the timeline, and who has joined."""

    names: Sequence[str] = ()
    kind: str = ""
    span: timeline.Span | None = None
    joined: set[int] = field(default_factory=set)


_courses: dict[tuple[int, ...], _Course] = {}


def negotiate(request: CollectiveRequest, process_set: ProcessSet, note: Any = None) -> Agreement:
    """Agree with the other processes of a set on its next collective.

    Raises DisagreementError in every process if requests differ.
    """
    world = world_of_session()
    if world is None:
        return _alone(request, note)
    course = _courses.setdefault(tuple(process_set.ranks), _Course())
    message = {
        "digest": request.digest() if request.kind != JOIN else JOIN,
        "note": note,
        "ready": time.time(),
        "span": course.span,
    }
    answers = _exchange(world, request, message, process_set)
    course.span = None
    joined = {
        rank
        for rank, answer in zip(process_set.ranks, answers, strict=True)
        if answer["digest"] == JOIN
    }
    _record_spans(course, process_set, answers)
    if len(joined) == len(process_set.ranks):
        new = joined - course.joined
        course.joined = set()
        return Agreement(request, [], last_to_join=max(new))
    course.joined = joined
    agreed = _agreed(world, request, process_set, answers, joined)
    course.names, course.kind = _names(agreed), agreed.kind
    _record_negotiation(course, process_set, [answer["ready"] for answer in answers])
    return Agreement(agreed, [answer["note"] for answer in answers])


def executed(process_set: ProcessSet, request: CollectiveRequest, span: timeline.Span) -> None:
    """Record when this process executed a collective."""
    course = _courses.setdefault(tuple(process_set.ranks), _Course())
    course.span = span
    timeline.record(session().rank, _names(request), request.kind.upper(), span)


def _alone(request: CollectiveRequest, note: Any) -> Agreement:
    if request.kind == JOIN:
        return Agreement(request, [], last_to_join=0)
    found = difference({0: request}, is_joined=False)
    if found is not None:
        raise framework().disagreement(found, is_bad_argument=bool(request.problem))
    return Agreement(request, [note])


def _agreed(
    world: World,
    request: CollectiveRequest,
    process_set: ProcessSet,
    answers: list[Any],
    joined: set[int],
) -> CollectiveRequest:
    """The common request of all processes that have not joined."""
    digests = {answer["digest"] for answer in answers} - {JOIN}
    if len(digests) == 1 and not joined:
        found = difference({session().rank: request}, is_joined=False)
        requests = [request]
    else:
        data = None if request.kind == JOIN else request.to_json()
        every = _exchange(world, request, data, process_set)
        by_rank = {
            rank: CollectiveRequest.from_json(each)
            for rank, each in zip(process_set.ranks, every, strict=True)
            if each is not None
        }
        found = difference(by_rank, is_joined=bool(joined))
        requests = list(by_rank.values())
    if found is not None:
        is_bad_argument = any(each.problem for each in requests)
        raise framework().disagreement(found, is_bad_argument=is_bad_argument)
    return requests[0]


def _exchange(
    world: World, request: CollectiveRequest, value: Any, process_set: ProcessSet
) -> list[Any]:
    ranks = None if process_set.process_set_id == 0 else process_set.ranks
    try:
        return world.all_gather(_TOPIC, value, ranks)
    except UnisonoError as error:
        raise type(error)(f"{request.title}: {error}") from error


def _names(request: CollectiveRequest) -> list[str]:
    """The names of the tensors in a timeline."""
    unnamed = request.name or request.kind
    if len(request.tensors) < 2:
        return [unnamed]
    names = [each.name for each in request.tensors]
    is_unique = len(set(names)) == len(names)
    return names if is_unique else [f"{unnamed}.{place}" for place in range(len(names))]


def _record_spans(course: _Course, process_set: ProcessSet, answers: list[Any]) -> None:
    """Requests carry the times of the previous collective in their process."""
    if not timeline.is_recording() or not course.kind:
        return
    for rank, answer in zip(process_set.ranks, answers, strict=True):
        if answer["span"] is not None and rank != session().rank:
            timeline.record(rank, course.names, course.kind.upper(), tuple(answer["span"]))


def _record_negotiation(course: _Course, process_set: ProcessSet, ready: list[float]) -> None:
    if timeline.is_recording():
        for rank, since in zip(process_set.ranks, ready, strict=True):
            what = f"NEGOTIATE_{course.kind.upper()}"
            timeline.record(rank, course.names, what, (since, max(ready)))
