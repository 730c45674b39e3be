"""The examination of this machine: which checks there are, their order, and the time they have.

Checks run one after the other, as they compete for the same cores and GPUs. The cheap ones come
first, then everything for the chosen backend, then the other backends while there is time.
"""

import dataclasses
import functools
import importlib.util
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from unisono.backends import FRAMEWORKS
from unisono.devices import Listing, list_devices, simulated_gpus
from unisono.devices.cpu import num_cores
from unisono.doctor import gpus, machine, software, training
from unisono.doctor.child import FULL_PRECISION, Answer, run_child
from unisono.doctor.results import Result, Verdict, broken, not_checked
from unisono.errors import DeviceError
from unisono.imports import keras_backend

BUDGET_S = 165.0
"""For all checks together; with the start and the end of processes it stays below three minutes."""
_FACTS_S = 60.0
_MAX_GPUS = 8
_MAX_SIMULATED = 4
_MAX_CPU_REPLICAS = 4
_MIN_LEFT_S = 5.0


@dataclass(frozen=True)
class Target:
    """What replicas of a backend run on in the checks."""

    kind: str
    """`GPU`, `CPU replica` or `simulated GPU`."""
    count: int
    env: dict[str, str] = field(default_factory=dict)
    """What hides a single GPU: two replicas need two devices."""

    @property
    def is_gpu(self) -> bool:
        return self.kind == "GPU"

    def __str__(self) -> str:
        return f"{self.count} {self.kind}s"


class Examination:
    """What checks share: the devices, the backends, the time that is left."""

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        self._deadline = time.monotonic() + budget_s
        self._facts: dict[str, Answer] = {}
        self.main = keras_backend()
        names = [name for name in (self.main, *FRAMEWORKS) if name in FRAMEWORKS]
        self.backends = [name for name in dict.fromkeys(names) if is_installed(name)]
        """The installed ones, the chosen one first."""

    @functools.cached_property
    def listing(self) -> Listing:
        return list_devices()

    @property
    def left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def has_time(self, seconds: float = _MIN_LEFT_S) -> bool:
        return self.left_s >= seconds

    def facts(self, backend: str) -> Answer:
        """What a backend is and sees; asked once."""
        if backend not in self._facts:
            self._facts[backend] = self.run("facts", backend=backend, limit_s=_FACTS_S)
        return self._facts[backend]

    def num_gpus(self, backend: str) -> int | None:
        """The GPUs that a backend sees; None where it did not answer."""
        found = self.facts(backend).of("devices")
        return int(found[0]["num_gpus"]) if found else None

    def target(self, backend: str) -> Target:
        """What replicas of a backend run on."""
        try:
            simulated = simulated_gpus()
        except DeviceError:
            simulated = 0
        if simulated:
            return Target("simulated GPU", max(2, min(simulated, _MAX_SIMULATED)))
        count = self.num_gpus(backend) or 0
        if count > 1:
            return Target("GPU", min(count, _MAX_GPUS))
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if count else {}
        return Target("CPU replica", max(2, min(num_cores(), _MAX_CPU_REPLICAS)), hidden)

    def run(
        self,
        program: str,
        *words: object,
        backend: str,
        limit_s: float,
        replicas: int | None = None,
        env: dict[str, str] | None = None,
        cores: Sequence[int] | None = None,
        is_exact: bool = True,
    ) -> Answer:
        """Run a program in a process of its own, in the time that is left."""
        granted_s = min(limit_s, max(self.left_s, _MIN_LEFT_S))
        answer = run_child(
            program,
            *words,
            backend=backend,
            limit_s=granted_s,
            replicas=replicas,
            env=(FULL_PRECISION if is_exact else {}) | (env or {}),
            cores=cores,
        )
        is_short = granted_s < limit_s
        if answer.is_late and not is_short:
            is_short = (machine.busy_fraction() or 0.0) > machine.MAX_BUSY
        return dataclasses.replace(answer, is_cut=answer.is_late and is_short)


Run = Callable[[Examination], Iterable[Result]]


@dataclass(frozen=True)
class Check:
    """One check: it may give several lines."""

    name: str
    group: str
    run: Run
    is_long: bool = False
    """Whether it is left out where no time is left."""


CHECKS: tuple[Check, ...] = (
    Check("versions", "Installed", software.check_versions),
    Check("requirements", "Installed", software.check_requirements),
    Check("backends", "Installed", software.check_backends, is_long=True),
    Check("driver", "GPUs", gpus.check_driver),
    Check("devices", "GPUs", gpus.check_gpus),
    Check("visible", "GPUs", gpus.check_backend_gpus, is_long=True),
    Check("cuda", "GPUs", gpus.check_cuda, is_long=True),
    Check("compute", "GPUs", gpus.check_compute, is_long=True),
    Check("cores", "Machine", machine.check_cores),
    Check("ports", "Machine", machine.check_ports),
    Check("limits", "Machine", machine.check_limits),
    Check("shm", "Machine", machine.check_shared_memory),
    Check("temp", "Machine", machine.check_temporary_folder),
    Check("slurm", "Machine", machine.check_slurm),
    Check("links", "Links", training.check_links, is_long=True),
    Check("contract", "Training", training.check_contract, is_long=True),
    Check("speed", "Training", training.check_speed, is_long=True),
    Check("others", "Training", training.check_others, is_long=True),
)


@dataclass(frozen=True)
class Report:
    """All results, by group."""

    results: tuple[tuple[str, Result], ...]
    seconds: float
    listing: Listing

    @property
    def exit_code(self) -> int:
        """1 where anything is broken."""
        return int(any(result.verdict is Verdict.BROKEN for _, result in self.results))

    def count(self, verdict: Verdict) -> int:
        return sum(result.verdict is verdict for _, result in self.results)


def examine(
    only: Sequence[str] = (),
    show: Callable[[str, Result], None] = lambda group, result: None,
    budget_s: float = BUDGET_S,
) -> Report:
    """Run the checks, or only those of these names or groups.

    Args:
        only: Names of checks or groups, in any case; all where there are none.
        show: Called with each group and result as soon as it is known.
        budget_s: The time for all of them; what does not fit is reported as not checked.

    Returns:
        The results. A check that fails itself is one of them, and never an exception.

    Example:

    >>> report = examine(only=["temp"])
    >>> [result.verdict.value for _, result in report.results]
    ['works']
    """
    began = time.monotonic()
    examination = Examination(budget_s)
    names = {name.lower() for name in only}
    found = []
    for check in CHECKS:
        if names and not {check.name, check.group.lower()} & names:
            continue
        for result in _results(check, examination):
            found.append((check.group, result))
            show(check.group, result)
    return Report(tuple(found), time.monotonic() - began, examination.listing)


def is_installed(package: str) -> bool:
    """Whether a package can be found, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _results(check: Check, examination: Examination) -> Iterator[Result]:
    if check.is_long and not examination.has_time():
        advice = f"unisono doctor --only {check.name}"
        yield not_checked(check.name, "no time was left", advice)
        return
    try:
        yield from check.run(examination)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        advice = "Please report it, with the output of `unisono doctor --json`."
        yield broken(check.name, f"the check itself failed with {cause}", advice)


def named_variables() -> dict[str, str]:
    """The environment's settings of frameworks, drivers and unisono, for a report."""
    prefixes = (
        *("CUDA_", "NCCL_", "GLOO_", "XLA_", "JAX_", "TF_", "TORCH_", "KERAS_", "HIP_", "ROCR_"),
        *("UNISONO_", "OMP_", "LD_LIBRARY_PATH", "NVIDIA_", "PYTORCH_"),
    )
    secret = ("SECRET", "TOKEN", "KEY", "PASSWORD")
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(prefixes) and not any(word in name for word in secret)
    }


def device_records(listing: Listing) -> list[dict[str, object]]:
    """The devices for a report: what they are, not whose processes run on them."""
    left_out = ("processes", "uuid")
    return [
        {key: value for key, value in dataclasses.asdict(device).items() if key not in left_out}
        for device in listing.devices
    ]
