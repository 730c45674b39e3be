"""Why a run ended: which process failed first, how, and what is printed about it.

When one process fails, others fail as a consequence within milliseconds. So a consequence of
another process' end (`echo`) counts less than a failure with a cause of its own, whichever was seen
first.
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
_OUR_THREADS = (" in _end_with_launcher", " in _send_heartbeats")
_OUR_FILE = str(Path(__file__).parent.with_name("bootstrap.py"))
_RUNNER = str(Path(__file__).with_name("program.py"))


@dataclass(frozen=True)
class Failure:
    """How one process failed, or a node."""

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
    """What is printed last."""
    first: Failure | None = None
    """The failure that ended it, if one did."""


def outcome_of(*, is_preempted: bool) -> Outcome:
    """The outcome of a run in which no process failed."""
    if not is_preempted:
        return Outcome()
    text = f"unisono: the run was preempted before it was complete (exit code {PREEMPTED_CODE}).\n"
    return Outcome(PREEMPTED_CODE, text)


def name_of(rank: int, host: str, pid: int) -> str:
    return f"rank {rank} (process {pid} on {host})"


def cause_of_report(report: dict[str, Any]) -> tuple[str, str, int]:
    """Kind, cause and exit code by a process' report."""
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
    """The one that the others are consequences of."""
    return min(failures, key=lambda failure: _WEIGHTS.get(failure.kind, _USUAL_WEIGHT))


def last_output(output: str, traceback: str, num_lines: int = 20) -> str:
    """The end of what a process printed, up to the traceback, which may be half printed."""
    lines, trace = output.splitlines(), traceback.splitlines()
    for i in range(max(0, len(lines) - len(trace)), len(lines)):
        whole, last = lines[i:-1], lines[-1]
        if whole == trace[: len(whole)] and trace[len(whole)].startswith(last):
            lines = lines[:i]
            break
    return "\n".join(lines[-num_lines:])


def describe(failures: Sequence[Failure], stacks: dict[int, str], whose: dict[int, str]) -> str:
    """What is printed of a failed run: stacks, the first failure's output, cause and traceback."""
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
        parts.append(f"All of its output is in {first.log}.")
    if first.traceback:
        parts.append(first.traceback.rstrip())
    return "\n".join(parts) + "\n"


def without_ours(stacks: str) -> str:
    """Stacks without the threads and frames of unisono itself."""
    kept = []
    for thread in stacks.split("\n\n"):
        lines = thread.splitlines()
        if any(line.endswith(_OUR_THREADS) for line in lines):
            continue
        kept.append(
            "\n".join(line for line in lines if _OUR_FILE not in line and _RUNNER not in line)
        )
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
