"""Run a function in one fresh process per replica of this machine.

The calling process is none of the replicas, so a notebook or a program with a model of its own is
left as it is; it only runs the rendezvous server of the run, on loopback.
"""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unisono.devices import Placement, choose, current_policy, num_gpus, select, warn_of_cores
from unisono.errors import StrategyError
from unisono.imports import keras_backend
from unisono.parallel import check_call

# What starts processes is imported when it is used: `import unisono` is to be quick.
if TYPE_CHECKING:
    from unisono.launch.plan import Facts, Resources
    from unisono.launch.rendezvous import RendezvousServer


def spawn(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    replicas: int | None = None,
    gpus: int | Sequence[int] | None = None,
) -> list[Any]:
    """Run a function in one process per replica.

    It does for a function what `unisono run` does for a script: inside it `unisono.parallel`,
    `Strategy` and `unisono.topology()` know the other processes. It works in a notebook, and in a
    script without `if __name__ == "__main__"`. The first replica's output is shown.

    Args:
        function: The function; it is pickled, with its arguments, by cloudpickle.
        args: Its positional arguments.
        kwargs: Its arguments by name.
        replicas: The number of processes; by default one per GPU.
        gpus: The number of GPUs, or a list of their ids.

    Returns:
        A list of what the function returned in each process, by rank.

    Raises:
        StrategyError: If the function cannot be called or pickled, or this process itself belongs
            to a run.
        DeviceError: If the devices do not exist.
        WorkerError: If a process dies. An exception in one of them ends all of them and is raised
            here.

    Example:
        >>> def rank():
        ...     import unisono
        ...
        ...     return unisono.topology().rank
        >>> spawn(rank, replicas=2)
        [0, 1]
    """
    from unisono.launch.client import current_world
    from unisono.launch.plan import timeout_s
    from unisono.launch.rendezvous import RendezvousServer
    from unisono.launch.wire import new_secret

    if current_world() is not None:
        raise StrategyError(
            "Asked to spawn processes in one of a run of several processes. Spawn them from a "
            "program that runs alone."
        )
    check_call("spawn", function, args, kwargs)
    placement = choose(replicas=replicas, gpus=gpus, num_visible_gpus=num_gpus())
    warn_of_cores(placement)
    task = _pack(function, args, kwargs or {})
    secret = new_secret()
    server = RendezvousServer(placement.num_replicas, secret, timeout_s=timeout_s(os.environ))
    # One seed for all, from this program's own: models that they build then begin alike.
    server.seed = random.randrange(2**31)
    try:
        return _run(task, placement, _facts(server, secret))
    finally:
        server.close()


def _run(task: bytes, placement: Placement, facts: "Facts") -> list[Any]:
    from unisono.launch.plan import environment
    from unisono.launch.workers import Workers, collect

    resources = _resources(placement)
    # The search path is not the one that this process was given, but the one it has now.
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    given["KERAS_BACKEND"] = keras_backend()
    envs = [environment(each, facts, rank, given) for rank, each in enumerate(resources)]
    workers = Workers("unisono.spawned", facts.world_size, [], envs)
    try:
        for worker, each in zip(workers, resources, strict=True):
            worker.channel.send((task, each.cores))
        results = collect(workers, "All replicas were ended.")
        workers.end()
        return results
    finally:
        workers.kill()


def _facts(server: "RendezvousServer", secret: str) -> "Facts":
    from unisono.launch.network import LOOPBACK, interface_of
    from unisono.launch.plan import Facts, start_timeout_s, timeout_s

    return Facts(
        first_rank=0,
        world_size=server.size,
        local_size=server.size,
        node=0,
        num_nodes=1,
        coordinator=server.address,
        secret=secret,
        host=LOOPBACK,
        interface=interface_of(LOOPBACK),
        timeout_s=timeout_s(os.environ),
        start_timeout_s=start_timeout_s(os.environ),
    )


def _resources(placement: Placement) -> "list[Resources]":
    from unisono.devices.cpu import num_cores
    from unisono.launch.plan import assign_resources

    is_on_cpus = placement.kind == "cpu" and not placement.is_simulated
    return assign_resources(
        placement.num_replicas,
        gpus=None if is_on_cpus else select(placement.indices),
        cores=sorted(os.sched_getaffinity(0)),
        num_cores=num_cores(),
        policy=current_policy(),
        given=os.environ,
    )


def _pack(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    from unisono.pickling import dumps

    try:
        packed = dumps((function, tuple(args), dict(kwargs)))
    except Exception as error:
        raise StrategyError(
            f"Asked to spawn {function!r}, but it or an argument cannot be sent to another "
            f"process: {error}. Make models, data sets and open files inside the function."
        ) from error
    return packed
