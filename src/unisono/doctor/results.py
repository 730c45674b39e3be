"""What a check finds: a verdict, one sentence, and what to do."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.doctor.child import Answer


class Verdict(enum.Enum):
    """How a part of the machine is."""

    WORKS = "works"
    SLOW = "slow"
    BROKEN = "broken"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Result:
    """One line of the report."""

    name: str
    verdict: Verdict
    sentence: str
    advice: str = ""
    """What to do, for what does not work; what to know, for what does."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Measurements, for `--json`."""


def works(name: str, sentence: str, advice: str = "", **data: Any) -> Result:
    return Result(name, Verdict.WORKS, sentence, advice, data)


def slow(name: str, sentence: str, advice: str, **data: Any) -> Result:
    return Result(name, Verdict.SLOW, sentence, advice, data)


def broken(name: str, sentence: str, advice: str, **data: Any) -> Result:
    return Result(name, Verdict.BROKEN, sentence, advice, data)


def not_checked(name: str, sentence: str, advice: str = "", **data: Any) -> Result:
    return Result(name, Verdict.NOT_CHECKED, sentence, advice, data)


def failed(name: str, answer: Answer, what: str, advice: str) -> Result:
    """A program that gave no answer: broken, unless it only had too little time."""
    if answer.is_cut:
        sentence = f"{what} {answer.problem}: too little time was left, or the machine is busy"
        return not_checked(name, sentence, "Repeat it when nothing else runs.")
    return broken(name, f"{what} {answer.problem or 'gave no answer'}", advice)
