"""Why a run ended: which process failed first, how, and what to tell of it.

When one process fails, others fail of it within milliseconds. So what is an echo of another's end
counts less than what has a cause of its own, and only then who came first.
"""

import dataclasses
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.devices.cpu import num_memory_kills
from unisono.errors import PREEMPTED_CODE

_WEIGHTS = {"interrupt": 0, "node": 0, "stall": 0, "kill": 0, "disagreement": 2, "echo": 3}
_USUAL_WEIGHT = 1
_OUR_THREADS = (" in _end_with_launcher", " in _beat")
_OUR_FILE = str(Path(__file__).parent.with_name("bootstrap.py"))


@dataclass(frozen=True)
class Failure:
    """How one process failed, or a whole node."""

    kind: str
    cause: str
    """Completes a sentence: `raised ValueError`."""
    code: int = 1
    """What the launcher exits with."""
    rank: int | None = None
    node: int = 0
    host: str = ""
    pid: int = 0
    traceback: str = ""
    last_lines: str = ""
    log: str | None = None
    note: str = ""

    def to_message(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "Failure":
        return cls(**{field.name: message[field.name] for field in dataclasses.fields(cls)})

    @property
    def who(self) -> str:
        return name_of(self.rank, self.host, self.pid) if self.rank is not None else self.host


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    code: int = 0
    text: str = ""
    """What is to be printed last."""
    first: Failure | None = None
    """The failure that ended it, if one did."""


def ended_well(has_made_room: bool) -> Outcome:
    """The outcome of a run in which nobody failed."""
    if not has_made_room:
        return Outcome()
    return Outcome(
        PREEMPTED_CODE,
        "unisono: the run has made room before it was complete, as it was asked to "
        f"(exit code {PREEMPTED_CODE}).\n",
    )


def name_of(rank: int, host: str, pid: int) -> str:
    return f"rank {rank} (process {pid} on {host})"


def cause_of_report(report: dict[str, Any]) -> tuple[str, str, int]:
    """Kind, cause and exit code by what a process told."""
    kind, code = str(report["kind"]), int(report["code"])
    if kind == "exit":
        return kind, f"ended itself with exit code {code}", code
    return kind, f"raised {report['error']}", code


def cause_of_code(code: int, memory_kills_before: int | None) -> tuple[str, str, int]:
    """The same by the exit code alone."""
    if code == 0:
        return "exit", "ended without finishing its program, by os._exit(0) or the like", 1
    if code > 0:
        return "exit", f"ended with exit code {code}", code
    number = -code
    cause = f"was ended by {signal_name(number)}"
    if number == signal.SIGKILL:
        cause += f", {_guess(memory_kills_before)}"
    return ("kill" if number == signal.SIGKILL else "signal"), cause, 128 + number


def first_of(failures: Sequence[Failure]) -> Failure:
    """The one that the others followed from."""
    return min(failures, key=lambda failure: _WEIGHTS.get(failure.kind, _USUAL_WEIGHT))


def last_words(output: str, traceback: str, num_lines: int = 20) -> str:
    """The end of what a process printed, up to the traceback, which may be half printed."""
    lines, trace = output.splitlines(), traceback.splitlines()
    for i in range(max(0, len(lines) - len(trace)), len(lines)):
        whole, last = lines[i:-1], lines[-1]
        if whole == trace[: len(whole)] and trace[len(whole)].startswith(last):
            lines = lines[:i]
            break
    return "\n".join(lines[-num_lines:])


def describe(failures: Sequence[Failure], stacks: dict[int, str], whose: dict[int, str]) -> str:
    """The last words of a run: stacks, what the first printed, who it was, and its traceback."""
    first = first_of(failures)
    parts = [f"{whose[rank]}:\n{without_ours(stacks[rank])}\n" for rank in sorted(stacks)]
    parts += [f"[rank {first.rank}] {line}" for line in first.last_lines.splitlines()]
    parts.append(f"unisono: {first.who} {first.cause}. All processes of the run were ended.")
    others = [other for other in failures if other is not first and other.rank != first.rank]
    if others:
        parts.append("After it: " + "; ".join(f"{other.who} {other.cause}" for other in others))
    if first.note:
        parts.append(first.note)
    if first.log is not None:
        parts.append(f"Its whole output is in {first.log}.")
    if first.traceback:
        parts.append(first.traceback.rstrip())
    return "\n".join(parts) + "\n"


def without_ours(stacks: str) -> str:
    """Stacks without the threads and the frames that we have put into every process."""
    kept = []
    for thread in stacks.split("\n\n"):
        lines = thread.splitlines()
        if any(line.endswith(_OUR_THREADS) for line in lines):
            continue
        kept.append("\n".join(line for line in lines if _OUR_FILE not in line))
    return "\n\n".join(kept).strip() or "(no answer)"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # Most real-time signals have no names.
        return f"signal {number}"


def _guess(memory_kills_before: int | None) -> str:
    now = num_memory_kills()
    if now is not None and memory_kills_before is not None and now > memory_kills_before:
        return (
            "most likely by the kernel for want of memory (it has killed for that reason since "
            "the run began): use a smaller per-replica batch, or fewer processes on this node"
        )
    return "which unisono did not send: somebody's kill, or the kernel for want of memory"
