"""How much of the devices a process may use: described as plain data, resolved on this machine.

A policy can be checked before a framework is imported and handed to worker processes as text. A
later policy only adds to an earlier one. A grant is a policy resolved for the GPUs of this machine,
which the backend applies.
"""

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.devices.choice import SIMULATED_GPUS, check_threads, gpu_ids, num_gpus, simulated_gpus
from unisono.devices.driver import Device
from unisono.devices.listing import list_devices
from unisono.devices.visibility import VISIBLE, read_visibility
from unisono.errors import DeviceError

POLICY = "UNISONO_POLICY"
_UNITS = {"B": 1}
_UNITS |= {f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}IB": 1024**i for i, prefix in enumerate("KMGT", 1)}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)", re.IGNORECASE)
_MAX_IDS = 1024
_IDLE = re.compile(r"idle(?::(\d+))?")


@dataclass(frozen=True)
class Policy:
    """What `configure` was asked for; None where nothing was asked."""

    gpus: int | tuple[int, ...] | str | None = None
    """A number of GPUs, their ids, or `idle` and `idle:n`."""
    memory: str | int | float | None = None
    """For each process on each GPU: `grow`, `all`, at most so many bytes (int), or at most this
    fraction of it (float)."""
    cpu_threads: int | None = None
    deterministic: bool | None = None
    """Whether GPUs compute the same bits each time, in full float32."""

    def __str__(self) -> str:
        """As the arguments of a call."""
        memory = format_bytes(self.memory) if isinstance(self.memory, int) else self.memory
        given = {**vars(self), "memory": memory}
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
    deterministic: bool | None = None,
) -> Policy:
    """A request as a policy; raises DeviceError for what no machine could satisfy.

    >>> print(describe(gpus=[0, 1], memory="8GiB"))
    gpus=[0, 1], memory='8 GiB'
    """
    if cpu_threads is not None:
        check_threads(cpu_threads)
    if deterministic not in (None, True, False):
        raise DeviceError(f"Asked for deterministic={deterministic!r}. Give True or False.")
    return Policy(_parsed_gpus(gpus), _parsed_memory(memory), cpu_threads, deterministic)


def current_policy() -> Policy:
    """The policy in force in this process."""
    return _current


def set_policy(policy: Policy) -> None:
    """Remember the policy that a backend has applied."""
    global _current
    _current = policy


def num_idle(gpus: object) -> int | None:
    """The n of `idle:n`; 0 for `idle`, which selects all idle ones; None for anything else."""
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
        ids = tuple(itertools.islice(gpus, _MAX_IDS + 1))  # A range may have any length.
        if len(ids) > _MAX_IDS:
            raise DeviceError(
                f"Asked for more than {_MAX_IDS} GPUs. Give the ids of this machine's own, which "
                "`unisono devices` lists."
            )
        return ids
    is_idle = num_idle(gpus) is not None and (gpus == "idle" or num_idle(gpus) != 0)
    if isinstance(gpus, str) and not is_idle:
        raise DeviceError(
            f'Asked for gpus={gpus!r}. Write gpus="idle" for all that are idle, gpus="idle:2" for '
            "the two emptiest, a number, or a list of ids."
        )
    return gpus  # Checked against the GPUs of the machine later.


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


_IDLE_SHARE = 0.5
"""A GPU with less of its memory free is in use, though by processes that cannot be seen here."""


@dataclass(frozen=True)
class Grant:
    """A policy resolved for this machine, ready for a backend to apply."""

    gpus: tuple[int, ...] | None = None
    """The GPUs to keep, by the numbers that CUDA gave them; None for all."""
    is_growing: bool | None = None
    """True: allocate memory as needed. False: all at the start. None: the backend's default."""
    limit_bytes: int | None = None
    """At most so much of each GPU..."""
    limit_share: float | None = None
    """...which is this part of the largest one, so that the limit holds on all."""
    cpu_threads: int | None = None
    is_deterministic: bool = False
    """Choose kernels that give the same bits each time, and no TF32."""


@dataclass(frozen=True)
class Selection:
    """The GPUs of a grant: their numbers, and their names for `CUDA_VISIBLE_DEVICES`."""

    numbers: tuple[int, ...]
    names: tuple[str, ...]
    total_bytes: tuple[int | None, ...]
    is_simulated: bool = False
    cores: tuple[tuple[int, ...], ...] = ()
    """The cores nearest to each, where the driver knows them."""

    def hide_others(self) -> None:
        """Make this process, and those it starts, see no other GPU."""
        if self.is_simulated:
            os.environ[SIMULATED_GPUS] = str(len(self.numbers))
        else:
            os.environ[VISIBLE] = ",".join(self.names)


def select(gpus: int | Sequence[int] | str | None) -> Selection:
    """The GPUs that are asked for, all visible ones for None; raises DeviceError."""
    if simulated_gpus():
        numbers = _simulated_numbers(gpus, simulated_gpus())
        return Selection(numbers, (), (), is_simulated=True)
    listing = list_devices()
    records = {
        device.visible_index: device
        for device in listing.devices
        if device.kind == "gpu" and device.visible_index is not None
    }
    names = _names(listing.devices)
    numbers = _numbers(gpus, len(names), list(records.values()), " ".join(listing.notes))
    totals = tuple(records[i].total_bytes if i in records else None for i in numbers)
    cores = tuple(records[i].nearest_cores if i in records else () for i in numbers)
    return Selection(numbers, tuple(names[i] for i in numbers), totals, cores=cores)


def grant_of(policy: Policy, selection: Selection) -> Grant:
    """Resolve a policy for the selected GPUs; raises DeviceError where that is impossible."""
    memory, totals = policy.memory, selection.total_bytes
    limit_bytes: int | None = None
    limit_share: float | None = None
    if isinstance(memory, (int, float)) and totals:
        known = [total for total in totals if total is not None]
        if len(known) < len(totals):
            raise DeviceError(
                f"Asked for memory={memory}; found no way to tell how much the GPUs have. See "
                "`unisono devices`, install nvidia-ml-py (pip install nvidia-ml-py) if it is "
                'missing, or ask for "grow".'
            )
        limit_bytes = memory if isinstance(memory, int) else int(memory * min(known))
        if limit_bytes > min(known):
            raise DeviceError(
                f"Asked for memory={format_bytes(limit_bytes)} a GPU; found one with "
                f"{format_bytes(min(known))}. Ask for at most that, or for a share of the whole."
            )
        limit_share = limit_bytes / max(known)
    return Grant(
        gpus=selection.numbers if policy.gpus is not None else None,
        is_growing={"grow": True, "all": False}.get(str(memory)),
        limit_bytes=limit_bytes,
        limit_share=limit_share,
        cpu_threads=policy.cpu_threads,
        is_deterministic=bool(policy.deterministic),
    )


def idle_gpus(gpus: Sequence[Device]) -> list[Device]:
    """Those that no other process computes on, the emptiest first."""

    def is_idle(gpu: Device) -> bool:
        if gpu.error is not None or gpu.free_bytes is None or gpu.total_bytes is None:
            return False
        is_ours = all(process.pid == os.getpid() for process in gpu.processes)
        return is_ours and gpu.free_bytes >= _IDLE_SHARE * gpu.total_bytes

    return sorted(filter(is_idle, gpus), key=lambda gpu: (-(gpu.free_bytes or 0), gpu.index))


def _simulated_numbers(gpus: int | Sequence[int] | str | None, count: int) -> tuple[int, ...]:
    idle = num_idle(gpus)
    if gpus is None or idle == 0:
        return tuple(range(count))
    if idle is not None:
        return gpu_ids(idle, count)
    assert not isinstance(gpus, str)
    return gpu_ids(gpus, count)


def _numbers(
    gpus: int | Sequence[int] | str | None, available: int, records: Sequence[Device], notes: str
) -> tuple[int, ...]:
    if gpus is None:
        return tuple(range(available))
    if not available:
        raise DeviceError(
            f"Asked for gpus={shown(gpus)}; found no visible GPU. {notes} Leave gpus= out to work "
            f"on the CPU, or set {SIMULATED_GPUS} to rehearse."
        )
    if isinstance(gpus, str):
        if not records:
            raise DeviceError(
                f"Asked for gpus={gpus!r}; found no GPU that tells whether it is idle. {notes} "
                "Name ids instead."
            )
        return _idle_numbers(gpus, records)
    numbers = gpu_ids(gpus, available)
    _refuse_failing(gpus, [record for record in records if record.visible_index in numbers])
    return numbers


def _idle_numbers(asked: str, gpus: Sequence[Device]) -> tuple[int, ...]:
    idle = idle_gpus(gpus)
    wanted = num_idle(asked) or max(1, len(idle))
    if len(idle) < wanted:
        raise DeviceError(
            f"Asked for gpus={asked!r}; found {len(idle)} idle of {len(gpus)} visible GPU(s). "
            "`unisono devices` shows who uses them. Ask for fewer, or name their ids."
        )
    chosen = sorted(idle[:wanted], key=lambda gpu: gpu.index)
    return tuple(gpu.visible_index for gpu in chosen if gpu.visible_index is not None)


def _names(devices: Sequence[Device]) -> list[str]:
    """Names of the visible GPUs that do not depend on CUDA's device order: UUIDs if possible."""
    gpus = [device for device in devices if device.kind == "gpu"]
    uuids = [gpu.uuid for gpu in gpus]
    visibility = read_visibility(gpus or num_gpus())
    if VISIBLE in os.environ or not gpus or None in uuids:
        return list(visibility.entries)
    return [uuid for uuid in uuids if uuid is not None]


def _refuse_failing(asked: object, gpus: Sequence[Device]) -> None:
    for gpu in gpus:
        if gpu.error is not None:
            raise DeviceError(
                f"Asked for gpus={shown(asked)}; GPU {gpu.visible_index} fails: {gpu.error}. "
                "Choose others."
            )
