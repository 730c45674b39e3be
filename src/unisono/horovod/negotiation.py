"""Before each collective the processes tell each other what they are about to do.

So a difference is an error of all of them that names it, and nobody enters a collective that
others never come to. In the usual case a request is a checksum; only where checksums differ, or a
process has joined and must know what to give zeros for, is it told in full.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.errors import UnisonoError
from unisono.horovod import timeline
from unisono.horovod.frameworks import disagreement
from unisono.horovod.process_sets import ProcessSet
from unisono.horovod.requests import JOIN, Request, difference
from unisono.horovod.session import session, world_of_session
from unisono.launch.client import World

_TOPIC = "a collective of unisono.horovod"


@dataclass(frozen=True)
class Agreement:
    """What all processes of a set are about to do together."""

    request: Request
    notes: list[Any]
    """What each process of the set wanted the others to know."""
    last_to_join: int | None = None
    """Where all have joined: who was last."""


@dataclass
class _Course:
    """How far a process set has come."""

    names: Sequence[str] = ()
    kind: str = ""
    span: timeline.Span | None = None
    joined: set[int] = field(default_factory=set)


_courses: dict[tuple[int, ...], _Course] = {}


def negotiate(request: Request, process_set: ProcessSet, note: Any = None) -> Agreement:
    """Come to the next collective of a set; what it is, once all have come.

    DisagreementError in every process where their requests differ.
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


def executed(process_set: ProcessSet, request: Request, span: timeline.Span) -> None:
    """Note when this process did its part of a collective."""
    course = _courses.setdefault(tuple(process_set.ranks), _Course())
    course.span = span
    timeline.record(session().rank, _names(request), request.kind.upper(), span)


def _alone(request: Request, note: Any) -> Agreement:
    if request.kind == JOIN:
        return Agreement(request, [], last_to_join=0)
    found = difference({0: request}, is_joined=False)
    if found is not None:
        raise disagreement(found, is_bad_argument=bool(request.problem))
    return Agreement(request, [note])


def _agreed(
    world: World,
    request: Request,
    process_set: ProcessSet,
    answers: list[Any],
    joined: set[int],
) -> Request:
    """The one request of all that have not joined."""
    digests = {answer["digest"] for answer in answers} - {JOIN}
    if len(digests) == 1 and not joined:
        found = difference({session().rank: request}, is_joined=False)
        requests = [request]
    else:
        told = None if request.kind == JOIN else request.to_json()
        every = _exchange(world, request, told, process_set)
        by_rank = {
            rank: Request.from_json(each)
            for rank, each in zip(process_set.ranks, every, strict=True)
            if each is not None
        }
        found = difference(by_rank, is_joined=bool(joined))
        requests = list(by_rank.values())
    if found is not None:
        is_bad_argument = any(each.problem for each in requests)
        raise disagreement(found, is_bad_argument=is_bad_argument)
    return requests[0]


def _exchange(world: World, request: Request, value: Any, process_set: ProcessSet) -> list[Any]:
    ranks = None if process_set.process_set_id == 0 else process_set.ranks
    try:
        return world.all_gather(_TOPIC, value, ranks)
    except UnisonoError as error:
        raise type(error)(f"{request.title}: {error}") from error


def _names(request: Request) -> list[str]:
    """What the tensors are called in a timeline."""
    unnamed = request.name or request.kind
    if len(request.tensors) < 2:
        return [unnamed]
    names = [each.name for each in request.tensors]
    is_told = len(set(names)) == len(names)
    return names if is_told else [f"{unnamed}.{place}" for place in range(len(names))]


def _record_spans(course: _Course, process_set: ProcessSet, answers: list[Any]) -> None:
    """Other ranks tell when they did the previous collective with the request for this one."""
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
