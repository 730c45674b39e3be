"""How much of the devices a process may take: described here, applied by the backend's engine.

A policy is plain data, so that it can be checked before a framework is there and handed to worker
processes as text. Of a later policy only what was still open counts; what was set stays.
"""

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.devices.choice import check_count
from unisono.errors import DeviceError

POLICY = "UNISONO_POLICY"
_UNITS = {"B": 1}
_UNITS |= {f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}IB": 1024**i for i, prefix in enumerate("KMGT", 1)}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)", re.IGNORECASE)
_IDLE = re.compile(r"idle(?::(\d+))?")


@dataclass(frozen=True)
class Policy:
    """What `configure` was asked for; None where nothing was asked."""

    gpus: int | tuple[int, ...] | str | None = None
    """A number of GPUs, their ids, or `idle` and `idle:n`."""
    memory: str | int | float | None = None
    """For each process on each GPU: `grow`, `all`, at most so many bytes (int), or at most this
    share of the whole (float)."""
    cpu_threads: int | None = None

    def __str__(self) -> str:
        """As the arguments of a call."""
        memory = format_bytes(self.memory) if isinstance(self.memory, int) else self.memory
        given = {"gpus": self.gpus, "memory": memory, "cpu_threads": self.cpu_threads}
        return ", ".join(f"{k}={shown(v)}" for k, v in given.items() if v is not None)

    def joined_with(self, later: "Policy") -> "Policy":
        """This policy with what a later call adds; raises where the two contradict."""
        for field in dataclasses.fields(Policy):
            before, after = getattr(self, field.name), getattr(later, field.name)
            if before is not None and after is not None and before != after:
                raise DeviceError(
                    f"Asked for {Policy(**{field.name: after})}; an earlier call of "
                    f"unisono.configure has set {Policy(**{field.name: before})}. Make one call."
                )
        given = {key: value for key, value in vars(later).items() if value is not None}
        return dataclasses.replace(self, **given)

    def to_text(self) -> str:
        """As one line, for the environment of a worker process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_environment(cls) -> "Policy":
        """The policy that a worker process was started with."""
        text = os.environ.get(POLICY)
        if not text:
            return cls()
        fields = json.loads(text)
        gpus = fields.get("gpus")
        return cls(**{**fields, "gpus": tuple(gpus) if isinstance(gpus, list) else gpus})


_current = Policy()


def describe(
    gpus: int | Sequence[int] | str | None = None,
    memory: str | float | None = None,
    cpu_threads: int | None = None,
) -> Policy:
    """A request as a policy; raises DeviceError for what makes no sense on any machine.

    >>> describe(gpus=[0, 1], memory="8GiB")
    Policy(gpus=(0, 1), memory=8589934592, cpu_threads=None)
    """
    if cpu_threads is not None:
        check_count("cpu_threads", cpu_threads)
    return Policy(_parsed_gpus(gpus), _parsed_memory(memory), cpu_threads)


def current_policy() -> Policy:
    """What is in force in this process."""
    return _current


def set_policy(policy: Policy) -> None:
    """Remember what has been put in force."""
    global _current
    _current = policy


def num_idle(gpus: object) -> int | None:
    """The n of `idle:n`; 0 for `idle`, which takes all that are; None for anything else."""
    match = _IDLE.fullmatch(gpus) if isinstance(gpus, str) else None
    return int(match[1] or 0) if match else None


def format_bytes(count: int) -> str:
    """A number of bytes as people write it.

    >>> format_bytes(8 * 1024**3)
    '8 GiB'
    """
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f}".removesuffix(".0") + f" {unit}"


def _parsed_gpus(gpus: int | Sequence[int] | str | None) -> int | tuple[int, ...] | str | None:
    if isinstance(gpus, Sequence) and not isinstance(gpus, str):
        return tuple(gpus)
    is_idle = num_idle(gpus) is not None and (gpus == "idle" or num_idle(gpus) != 0)
    if isinstance(gpus, str) and not is_idle:
        raise DeviceError(
            f'Asked for gpus={gpus!r}. Write gpus="idle" for all that are idle, gpus="idle:2" for '
            "the two emptiest, a number, or a list of ids."
        )
    return gpus  # What else it may be is told against the GPUs that there are.


def _parsed_memory(memory: str | float | None) -> str | int | float | None:
    if memory is None or memory in ("grow", "all"):
        return memory
    if isinstance(memory, str):
        match = _AMOUNT.fullmatch(memory.strip())
        unit = _UNITS.get(match[2].upper()) if match else None
        if match and unit and float(match[1]) * unit >= 1:
            return int(float(match[1]) * unit)
    elif isinstance(memory, (int, float)) and not isinstance(memory, bool) and 0 < memory <= 1:
        return float(memory)
    raise DeviceError(
        f'Asked for memory={memory!r}. Write "grow" (what is needed), "all", an amount with its '
        'unit ("8GiB", "500MB"), or a share of the whole above 0 and up to 1 (0.5).'
    )


def shown(value: object) -> str:
    """A value as it is written in a call."""
    return repr(list(value)) if isinstance(value, tuple) else repr(value)
