"""The first line of a training program: reads its options, and puts its replicas in place."""

import sys
from collections.abc import Sequence

from unisono.errors import SettingError, UnisonoError
from unisono.launch.client import current_world
from unisono.training.comparison import compare
from unisono.training.datasets import check_source
from unisono.training.replicas import (
    are_processes,
    own_command,
    own_name,
    own_program,
    place,
    start_processes,
)
from unisono.training.run import Run
from unisono.training.settings import Settings, read, to_words


def begin(
    description: str | None = None,
    *,
    epochs: int,
    batch_per_replica: int,
    learning_rate: float,
    lr_scaling: str = "linear",
    warmup_epochs: int = 0,
    seed: int = 0,
    name: str | None = None,
    arguments: Sequence[str] | None = None,
) -> Run:
    """Read the options of a training program and start its replicas; what is given are defaults.

    Call it before Keras is imported, as it chooses the backend. Where the replicas are processes of
    their own it returns in those only. With `arguments` in place of the command line's, all of them
    stay in this process, and errors are raised.

    >>> run = begin(epochs=2, batch_per_replica=32, learning_rate=0.1, arguments=["--epochs", "3"])
    >>> run.epochs, run.global_batch // run.num_replicas
    (3, 32)
    """
    defaults = {
        "epochs": epochs,
        "batch_per_replica": batch_per_replica,
        "learning_rate": learning_rate,
        "lr_scaling": lr_scaling,
        "warmup_epochs": warmup_epochs,
        "seed": seed,
    }
    name = name or own_name()
    try:
        settings = read(name, description or "", defaults, arguments, command=own_command())
        _check(settings)
        if arguments is None and current_world() is None:
            _start_again(settings)
        return Run(settings, is_program=arguments is None)
    except UnisonoError as error:
        if arguments is not None:
            raise
        sys.exit(f"{name}: {error}")


def _check(settings: Settings) -> None:
    """Refuse what cannot end well, before it begins."""
    world = current_world()
    if world is None:
        place(settings)
    elif settings.replicas not in (None, world.size) or settings.is_compared:
        raise SettingError(
            f"Asked for --replicas or --compare in a run of {world.size} processes, each of which "
            "is one replica. Leave them out, or start the program by itself."
        )
    if world is None or world.is_chief:
        settings.outputs.check()
    check_source(settings.data)


def _start_again(settings: Settings) -> None:
    """Become the launcher of this same program, and end with it, where replicas are processes."""
    placement = place(settings)
    if settings.is_compared:
        sys.exit(compare(settings, own_program()))
    if are_processes(placement):
        sys.exit(start_processes(placement, [*own_program(), *to_words(settings)]))
