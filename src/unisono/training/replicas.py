"""Where the replicas of a training program run, and the program started again where they are many.

GPUs are driven by one process. CPU replicas are fastest as one process each, pinned to cores of its
own, so there the program is started anew by the launcher, as `unisono run` would.
"""

import os
import sys
from pathlib import Path

from unisono.devices import Placement, choose, num_gpus, remark_on_cores, select
from unisono.errors import SettingError
from unisono.launch.failure import Failure
from unisono.launch.launcher import perform
from unisono.launch.request import Request
from unisono.training.settings import Settings

# A first Ctrl-C lets the replicas end their step and save; a second one ends them at once.
_INTERRUPT_S = 600.0


def place(settings: Settings) -> Placement:
    """The devices that were asked for; DeviceError where they are not there."""
    return choose(replicas=settings.replicas, gpus=settings.gpus, num_visible_gpus=num_gpus())


def are_processes(placement: Placement) -> bool:
    """Whether the replicas are processes of their own."""
    return placement.kind == "cpu" and placement.num_replicas > 1


def start_processes(placement: Placement, program: list[str]) -> int:
    """Run a program as one process per replica, to its end; the exit code."""
    gpus = select(placement.indices) if placement.is_simulated else None
    if remark := remark_on_cores(placement.num_replicas):
        print(f"warning: {remark}", file=sys.stderr, flush=True)
    outcome = perform(
        Request(
            program=tuple(program),
            num_processes=placement.num_replicas,
            gpus=gpus,
            interrupt_s=_INTERRUPT_S,
        )
    )
    if not _has_spoken(outcome.first):
        sys.stdout.flush()
        sys.stderr.write(outcome.text)
    return outcome.code


def _has_spoken(failure: Failure | None) -> bool:
    """Whether the program itself has told its user why it ends."""
    if failure is None:
        return True
    return failure.kind == "interrupt" or (failure.kind == "exit" and failure.rank == 0)


def own_program() -> list[str]:
    """How this program was started: by its file, or `-m` and the module."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__")]
    if not os.path.exists(sys.argv[0]):
        raise SettingError(
            "Asked for replicas in processes of their own, which run the file of this program; it "
            "has none. Save it to a file, or give begin its arguments=[...] to stay in one process."
        )
    return [os.path.abspath(sys.argv[0])]


def own_command() -> str | None:
    """How a user starts this program, if not by its file."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    folder, _, name = spec.name.rpartition(".") if spec is not None else ("", "", "")
    return f"unisono train {name}" if folder == "unisono.recipes" else None


def own_name() -> str:
    """What this program is called."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return str(spec.name).removesuffix(".__main__").rpartition(".")[2]
    return Path(sys.argv[0]).stem if os.path.isfile(sys.argv[0]) else "training"
