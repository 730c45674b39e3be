"""Run a function in one process per replica and collect what each returns.

The process that asks is none of the replicas, so a notebook or a program with a model of its own
is left as it is. The first replica's output appears here as it is printed.
"""

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from unisono.devices import Placement
from unisono.engines.torch_team import first_cause, worker_environment, worker_error
from unisono.errors import StrategyError, WorkerError
from unisono.launch.workers import Workers

_ADVICE = "All replicas were ended."


def spawn(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    placement: Placement,
) -> list[Any]:
    """What the function returned on each replica, in their order."""
    task = _pack(function, args, kwargs)
    folder = tempfile.mkdtemp(prefix="unisono-")
    size = placement.num_replicas
    workers = Workers(
        "unisono.engines.torch_spawned",
        size,
        [os.path.join(folder, "store")],
        [worker_environment(placement, rank) for rank in range(size)],
    )
    try:
        # One seed for all: models that they build then begin with the same weights.
        workers.send((task, random.randrange(2**31)))
        results = _collect(workers, size)
        workers.end()
        return results
    finally:
        workers.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _pack(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    try:
        packed: bytes = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
    except Exception as error:
        raise StrategyError(
            f"Asked to spawn {function!r}, but it or an argument cannot be sent to another "
            f"process: {error}. Make models, data sets and open files inside the function."
        ) from error
    return packed


def _collect(workers: Workers, size: int) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < size:
        told = workers.pending(timeout_s=1.0)
        if told is None:
            silent = [w for w in workers if w.rank not in results and not w.is_alive]
            if silent:
                raise WorkerError(f"{silent[0].how_it_ended()} {_ADVICE}")
            continue
        worker, (kind, data, text) = told
        if kind == "error":
            raise worker_error(worker.rank, data, text)
        if kind == "lost":
            raise first_cause(workers, _ADVICE)
        results[worker.rank] = cloudpickle.loads(data)
    return [results[rank] for rank in range(size)]
