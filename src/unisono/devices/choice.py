"""Choose the devices that replicas run on, from what was asked and what there is.

Runs before any framework is imported and imports none: a backend reports how many GPUs it sees, the
decision is made here. `UNISONO_SIMULATED_GPUS=4` makes four CPU replicas stand in for GPUs 0 to 3,
`UNISONO_REPLICAS=n` is the default for `replicas`. `unisono verify` runs a program unchanged on one
device and on several, so the variable that it sets counts more than what the program asks for.
"""

import itertools
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.devices.counting import count_in_child
from unisono.devices.cpu import num_cores
from unisono.devices.driver import num_in_files, read_driver, traces
from unisono.devices.visibility import read_visibility
from unisono.errors import DeviceError
from unisono.topology import Topology

SIMULATED_GPUS = "UNISONO_SIMULATED_GPUS"
REPLICAS = "UNISONO_REPLICAS"
OVERSUBSCRIBE = "UNISONO_OVERSUBSCRIBE"
"""Set to 1, it allows any number of CPU replicas per core, without a warning."""

FORCED_REPLICAS = "UNISONO_VERIFY_REPLICAS"
"""Of `unisono verify`: how many replicas there are, whatever a program asks for."""
CLAIMED_REPLICAS = "UNISONO_VERIFY_CLAIM"
"""Of `unisono verify`: how many replicas a program is told that scales its batch with them."""

_MAX_PER_CORE = 8
_MAX_THREADS = 1024
"""Of a process, on any machine: programs are written for larger ones than they are tried on."""
_MAX_SHOWN = 16
_MAX_DIGITS = 19
_has_warned = False


@dataclass(frozen=True)
class Placement:
    """Where each replica runs: `indices[r]` is replica r's device of this `kind`.

    `is_simulated` marks CPU replicas that stand in for GPUs. In a run of several processes the
    indices are those of this process' own devices, and every process has as many.
    """

    kind: str
    indices: tuple[int, ...]
    is_simulated: bool = False
    num_processes: int = 1

    @property
    def num_replicas(self) -> int:
        return len(self.indices) * self.num_processes

    def __str__(self) -> str:
        if self.num_processes > 1:
            kind = "simulated gpu" if self.is_simulated else self.kind
            return f"a {kind} in each of {self.num_processes} processes"
        ids = ", ".join(str(i) for i in self.indices)
        if self.is_simulated:
            return f"gpu {ids} (simulated on the cpu)"
        if self.kind == "cpu" and self.num_replicas == 1:
            return "cpu"
        return f"{self.kind} {ids}"


def format_replicas(count: int) -> str:
    """A number of replicas as people write it.

    >>> format_replicas(1)
    '1 replica'
    """
    return "1 replica" if count == 1 else f"{count} replicas"


def simulated_gpus() -> int:
    """How many GPUs `UNISONO_SIMULATED_GPUS` simulates (0: none)."""
    return _count_from_environment(SIMULATED_GPUS, minimum=0) or 0


def default_replicas() -> int | None:
    """The number of replicas that `UNISONO_REPLICAS` sets, or None."""
    return _count_from_environment(REPLICAS, minimum=1)


def forced_replicas() -> int | None:
    """The number of replicas that `unisono verify` wants, or None."""
    return _count_from_environment(FORCED_REPLICAS, minimum=1)


def claimed_replicas(count: int) -> int:
    """The number of replicas to tell a program that has so many."""
    return _count_from_environment(CLAIMED_REPLICAS, minimum=1) or count


def num_gpus() -> int:
    """How many GPUs this machine shows, without importing a framework here.

    NVML counts, as it knows containers and WSL2. Where it does not answer although there are signs
    of a GPU (ROCm, for one), the backend is asked, in a process of its own. Simulated GPUs count.

    >>> isinstance(num_gpus(), int)
    True
    """
    if simulated_gpus():
        return simulated_gpus()
    gpus = read_driver().gpus
    if gpus:
        return len(read_visibility(gpus).entries)
    if not traces():
        return 0
    counted = count_in_child()
    if counted is not None:
        return counted
    present = num_in_files()
    return min(len(read_visibility(present).entries), present)


def num_listed_gpus() -> int:
    """How many GPUs NVML shows; quick, and 0 where it does not answer."""
    gpus = read_driver().gpus
    return len(read_visibility(gpus).entries) if gpus else 0


def choose(
    *, replicas: int | None, gpus: int | Sequence[int] | None, num_visible_gpus: int
) -> Placement:
    """Decide where replicas run; raises DeviceError when it cannot be done.

    >>> choose(replicas=2, gpus=None, num_visible_gpus=0)
    Placement(kind='cpu', indices=(0, 1), is_simulated=False, num_processes=1)
    """
    simulated = simulated_gpus()
    available = simulated or num_visible_gpus
    if (forced := forced_replicas()) is not None:
        replicas, gpus = forced, None
    if replicas is not None:
        check_count("replicas", replicas)
    if gpus is not None:
        ids = gpu_ids(gpus, available)
        if replicas is not None and replicas != len(ids):
            raise DeviceError(
                f"Asked for replicas={replicas} on gpus={gpus!r}, which is {len(ids)} GPUs. "
                "Leave one of the two out, or make them agree."
            )
    else:
        ids = _default_ids(replicas, available)
    if simulated:
        return Placement("cpu", ids, is_simulated=True)
    return Placement("gpu" if available else "cpu", ids)


def choose_own(
    facts: Topology,
    *,
    replicas: int | None,
    gpus: int | Sequence[int] | None,
    num_visible_gpus: int,
) -> Placement:
    """The device of this process in a run of several, each of which has one replica.

    >>> choose_own(Topology(1, 2), replicas=2, gpus=None, num_visible_gpus=0)
    Placement(kind='cpu', indices=(0,), is_simulated=False, num_processes=2)
    """
    size = facts.world_size
    if forced_replicas() is not None:
        replicas = gpus = None
    if replicas is not None:
        check_count("replicas", replicas)
        if replicas != size:
            raise DeviceError(
                f"Asked for replicas={replicas} in a run of {size} processes, each of which is one "
                f"replica. Leave replicas= out, or start {replicas} processes."
            )
    if gpus is not None:
        count = len(gpus) if isinstance(gpus, Sequence) else gpus
        if count != facts.local_size:
            raise DeviceError(
                f"Asked for gpus={gpus!r} in a run with {facts.local_size} process(es) on this "
                "node, each of which has one GPU. Leave gpus= out and choose with `unisono run "
                "--gpus`."
            )
    simulated = simulated_gpus()
    if simulated:
        return Placement("cpu", (0,), is_simulated=True, num_processes=size)
    if not num_visible_gpus:
        return Placement("cpu", (0,), num_processes=size)
    if 1 < num_visible_gpus < facts.local_size:
        raise DeviceError(
            f"This node runs {facts.local_size} processes and shows {num_visible_gpus} GPUs to "
            "each. Start as many processes as there are GPUs."
        )
    # One that a launcher made visible alone, or this process' own among all.
    index = 0 if num_visible_gpus == 1 else facts.local_rank
    return Placement("gpu", (index,), num_processes=size)


def _default_ids(replicas: int | None, available: int) -> tuple[int, ...]:
    count = replicas if replicas is not None else default_replicas()
    if count is None:
        count = max(available, 1)
    if not available:
        check_cores("replicas" if replicas is not None else REPLICAS, count)
    elif count > available:
        is_given = replicas is not None
        raise DeviceError(
            f"Asked for {'replicas' if is_given else REPLICAS}={count}; this machine has "
            f"{available} GPU(s): {list(range(available))}. Ask for at most {available}, or "
            f"{'leave replicas= out' if is_given else 'unset it'} to take all."
        )
    return tuple(range(count))


def gpu_ids(gpus: int | Sequence[int], available: int) -> tuple[int, ...]:
    """The ids that a request means, among so many GPUs; raises DeviceError."""
    if isinstance(gpus, int) and not isinstance(gpus, bool):
        check_count("gpus", gpus)
        if gpus > max(available, _MAX_SHOWN):
            raise DeviceError(
                f"Asked for gpus={gpus}; this machine has {available} GPU(s). Ask for at most as "
                "many, or leave gpus= out to take all."
            )
        ids: tuple[int, ...] = tuple(range(gpus))
    elif isinstance(gpus, Sequence) and not isinstance(gpus, str):
        most = max(available, _MAX_SHOWN)
        ids = tuple(itertools.islice(gpus, most + 1))  # A range may have any length.
        if len(ids) > most:
            raise DeviceError(
                f"Asked for more than {most} GPUs; this machine has {available} GPU(s). Ask for at "
                "most as many, or leave gpus= out to take all."
            )
    else:
        raise DeviceError(
            f"Asked for gpus={gpus!r}; found a {type(gpus).__name__}. "
            "Give a number of GPUs (gpus=2) or a list of their ids (gpus=[0, 2])."
        )
    if not ids:
        raise DeviceError(
            "Asked for gpus=[]: no GPU at all. Name at least one id, or leave gpus= out to take "
            "all."
        )
    for i in ids:
        if not isinstance(i, int) or isinstance(i, bool) or i < 0:
            raise DeviceError(
                f"Asked for gpus={gpus!r}; {i!r} is not a GPU id. Ids are whole numbers from 0."
            )
    if len(set(ids)) != len(ids):
        raise DeviceError(f"Asked for gpus={gpus!r}, which repeats an id. Name each GPU once.")
    if any(i not in range(available) for i in ids):
        raise DeviceError(
            f"Asked for GPUs {list(ids)}; this machine has {list(range(available))}. "
            "Choose among those, or leave gpus= out to take all."
            if available
            else f"Asked for GPUs {list(ids)}; the backend sees no GPU on this machine. Ask for "
            f"replicas={len(ids)} to train on CPU replicas, or set {SIMULATED_GPUS}={max(ids) + 1} "
            "to rehearse."
        )
    return ids


def check_cores(name: str, count: int) -> None:
    """Refuse a number of CPU replicas that is far beyond this machine's cores."""
    if count <= _MAX_PER_CORE or _is_oversubscribing():
        return  # Any machine has a core.
    cores = num_cores()
    if count > _MAX_PER_CORE * cores:
        raise DeviceError(
            f"Asked for {name}={count}; this machine has {_format_cores(cores)} for CPU replicas, "
            f"and no GPU is used. Ask for at most {_MAX_PER_CORE * cores} ({_MAX_PER_CORE} per "
            f"core), or set {OVERSUBSCRIBE}=1 to try more."
        )


def check_threads(count: int) -> None:
    """Refuse a number of threads with which a framework would fail to start, or hang."""
    check_count("cpu_threads", count)
    if count <= _MAX_THREADS or _is_oversubscribing():
        return
    cores = num_cores()
    if count > _MAX_PER_CORE * cores:
        raise DeviceError(
            f"Asked for cpu_threads={count}; this machine has {_format_cores(cores)}. Ask for at "
            f"most {max(_MAX_THREADS, _MAX_PER_CORE * cores)}, or set {OVERSUBSCRIBE}=1 to try "
            "more."
        )


def remark_on_cores(count: int, what: str = "CPU replicas") -> str | None:
    """A warning about more CPU replicas than there are cores; None where there are enough.

    >>> remark_on_cores(1)
    """
    cores = num_cores()
    if count <= cores or _is_oversubscribing():
        return None
    return f"{count} {what} share {_format_cores(cores)}, and take turns on them: no speed-up."


def warn_of_cores(placement: Placement) -> None:
    """Warn of more CPU replicas than cores, once in a process."""
    global _has_warned
    if placement.kind != "cpu" or _has_warned:
        return
    if remark := remark_on_cores(len(placement.indices)):
        _has_warned = True
        warnings.warn(remark, stacklevel=4)


def _is_oversubscribing() -> bool:
    return os.environ.get(OVERSUBSCRIBE) == "1"


def _format_cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def check_count(name: str, value: object) -> None:
    """Refuse what is not a count of at least one."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise DeviceError(f"Asked for {name}={value!r}. Give a whole number of at least 1.")


def _count_from_environment(name: str, *, minimum: int) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    is_number = text.isascii() and text.isdigit() and len(text) < _MAX_DIGITS
    if not is_number or int(text) < minimum:
        raise DeviceError(
            f"Found {name}={text!r} in the environment. "
            f"Set it to a whole number of at least {minimum}, or unset it."
        )
    check_cores(name, int(text))
    return int(text)
