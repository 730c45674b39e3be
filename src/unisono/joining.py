"""Join the run that this process was started for, on `import unisono`.

Frameworks refuse to join once they have started, and building a model starts them. So the line to
the other processes is made at once, and the backend's engine joins right after its framework is
imported, before a program can use it.
"""

import functools
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from unisono.errors import LaunchError
from unisono.imports import after_import, keras_backend
from unisono.launch.client import World, current_world, enter
from unisono.launch.plan import START_TIMEOUT
from unisono.launch.preemption_signal import WARNING, listen
from unisono.launch.secret import SECRET
from unisono.topology import JOINED, Topology, is_slurm_task, settle, topology
from unisono.versions import check_versions

_START_TIMEOUT_S = 300.0
# By framework: the module of its backend that has `join`.
_MODULES = {
    "jax": "jax.distributed",
    "tensorflow": "tensorflow.distributed",
    "torch": "torch.process_group",
}


def join() -> World | None:
    """Join the run of several processes that this one belongs to, if there is one."""
    if is_command(sys.orig_argv):
        return None  # A launcher of ours that another one started on each node, say.
    facts = _fitted(topology())
    _listen(facts)
    if facts.world_size == 1 or current_world() is not None:
        return current_world()
    timeout_s = float(os.environ.get(START_TIMEOUT) or _START_TIMEOUT_S)
    if facts.launcher == "unisono":
        secret = os.environ.get(SECRET, "")
        if not facts.coordinator or not secret:
            raise LaunchError(
                f"This process is rank {facts.rank} of {facts.world_size}, but was not told where "
                "the others meet. Start it with `unisono run`, which sets all of its variables."
            )
    else:
        # Only here: a program that runs alone has no use for a server.
        from unisono.launch.environments import arrange

        facts, secret = arrange(facts, os.environ, start_timeout_s=timeout_s)
        settle(facts)
    world = World(facts, secret, start_timeout_s=timeout_s)
    os.environ[JOINED] = str(os.getpid())
    enter(world)
    if not world.is_chief:
        # One run of W&B for all processes. `wandb.init(mode=...)` still opens one in each.
        os.environ["WANDB_MODE"] = "disabled"
    after_import("keras", lambda keras: _prepare_keras(keras, world))
    for framework in _MODULES:
        after_import(framework, functools.partial(_join_backend, framework, world))
    return world


def _fitted(facts: Topology) -> Topology:
    """The place of a task of Slurm's, once it is clear that tasks and GPUs fit; or its end."""
    if facts.launcher != "slurm" or current_world() is not None:
        return facts
    from unisono.slurm.step import fit_ranks, read_step

    step = read_step(os.environ)
    assert step is not None
    try:
        fitted, remark = fit_ranks(facts, step)
    except LaunchError as error:
        # Said once for a node, and without the traceback that each of its tasks would print.
        raise SystemExit(f"unisono: {error}" if step.task == 0 else 1) from error
    if remark and step.is_first:
        print(f"unisono: {remark}", file=sys.stderr, flush=True)
    if fitted is None:
        raise SystemExit(0)
    return settle(fitted)


def _listen(facts: Topology) -> None:
    """Take signals for warnings where somebody may send them as such."""
    if facts.launcher == "unisono":
        listen(WARNING)
    if is_slurm_task(os.environ):
        listen(WARNING, signal.SIGTERM)


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


def _prepare_keras(keras: Any, world: World) -> None:
    check_versions("keras")
    # Models that the processes build then begin alike, and their data is shuffled alike.
    importlib.import_module("unisono.replication.seeds").set_seed(world.seed)
    if keras_backend() == "torch" and world.is_ours:
        importlib.import_module("unisono.backends.torch.native_optimizers").hook_for_good(world)


def _join_backend(framework: str, world: World, module: Any) -> None:
    if keras_backend() == framework and world.is_ours:
        check_versions(framework)
        importlib.import_module(f"unisono.backends.{_MODULES[framework]}").join(world)
