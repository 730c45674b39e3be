"""Join the run that this process was started for, on `import unisono`.

Frameworks refuse to join once they have started, and building a model starts them. So the
connection to the rendezvous server is made at once, and a framework joins right after it is
imported, before a program can use it.
"""

import functools
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unisono.backends import FRAMEWORKS, load_framework
from unisono.errors import LaunchError
from unisono.imports import after_import, check_versions, keras_backend
from unisono.launch.preemption_signal import PREEMPTION_SIGNAL, handle_signals
from unisono.log import logger
from unisono.topology import JOINED, Topology, is_slurm_task, settle, topology

# The client of a run is imported by those who join one: `import unisono` is to be quick.
if TYPE_CHECKING:
    from unisono.launch.client import World


def join() -> None:
    """Join the run of several processes that this one belongs to, if there is one."""
    if is_command(sys.orig_argv):
        return  # `unisono run` itself, say, which another launcher started on each node.
    facts = _fitted(topology())
    _listen(facts)
    if facts.world_size > 1:
        _join_world(facts)


def _join_world(facts: Topology) -> None:
    from unisono.launch.client import World, current_world, enter
    from unisono.launch.plan import start_timeout_s
    from unisono.launch.wire import SECRET

    if current_world() is not None:
        return
    timeout_s = start_timeout_s(os.environ)
    if facts.launcher == "unisono":
        secret = os.environ.get(SECRET, "")
        if not facts.coordinator or not secret:
            raise LaunchError(
                f"This process is rank {facts.rank} of {facts.world_size}, but has no address of "
                "the rendezvous server. Start it with `unisono run`, which sets all variables."
            )
    else:
        # Only here: a program that runs alone has no use for a server.
        from unisono.launch.environments import rendezvous

        facts, secret = rendezvous(facts, os.environ, start_timeout_s=timeout_s)
        settle(facts)
    world = World(facts, secret, start_timeout_s=timeout_s)
    os.environ[JOINED] = str(os.getpid())
    enter(world)
    if not world.is_chief:
        # One run of W&B for all processes. `wandb.init(mode=...)` still opens one in each.
        os.environ["WANDB_MODE"] = "disabled"
    after_import("keras", lambda keras: _join_keras(world))
    for name in FRAMEWORKS:
        after_import(name, functools.partial(_join_framework, name, world))


def _fitted(facts: Topology) -> Topology:
    """The topology of a Slurm task, once tasks and GPUs are known to fit; a surplus task ends."""
    if facts.launcher != "slurm":
        return facts
    from unisono.launch.client import current_world
    from unisono.slurm.step import fit_ranks, read_step

    if current_world() is not None:
        return facts

    step = read_step(os.environ)
    assert step is not None
    try:
        fitted, remark = fit_ranks(facts, step)
    except LaunchError as error:
        # Printed once per node, without the traceback that each of its tasks would print.
        raise SystemExit(f"unisono: {error}" if step.task == 0 else 1) from error
    if remark and step.is_first:
        logger.warning(remark)
    if fitted is None:
        raise SystemExit(0)
    return settle(fitted)


def _listen(facts: Topology) -> None:
    """Handle preemption signals where a launcher or a cluster may send them."""
    if facts.launcher == "unisono":
        handle_signals(PREEMPTION_SIGNAL)
    if is_slurm_task(os.environ):
        handle_signals(PREEMPTION_SIGNAL, signal.SIGTERM)


def is_command(words: Sequence[str]) -> bool:
    """Whether an interpreter's command line runs `unisono` itself, and not a program.

    >>> is_command(["python", "-m", "unisono", "devices"])
    True
    """
    rest = iter(words[1:])
    for word in rest:
        if word == "-m":
            return next(rest, "") == "unisono"
        if word in ("-W", "-X"):
            next(rest, "")
        elif not word.startswith("-"):
            return os.path.basename(word) == "unisono"
    return False


def _join_keras(world: "World") -> None:
    check_versions("keras")
    from unisono.replication.random_state import set_seed

    # Models that the processes build then begin alike, and their data is shuffled alike.
    set_seed(world.seed)
    if world.is_ours and keras_backend() in FRAMEWORKS:
        load_framework().join_keras(world)


def _join_framework(name: str, world: "World", module: Any) -> None:
    if keras_backend() == name and world.is_ours:
        check_versions(name)
        load_framework(name).join(world)
