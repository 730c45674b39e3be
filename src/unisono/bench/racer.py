"""One process of a benchmark: trains a net in some way, a pass at a time, when a file says so.

    python -m unisono.bench.racer FOLDER WAY NET NUM_STEPS NUM_REPLICAS

It writes FOLDER/WAY-ready-RANK after a warm-up, and FOLDER/WAY-N-RANK with what the Nth pass took,
as JSON; a pass begins when FOLDER/WAY-N appears, and the process ends when FOLDER/end does.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.bench.nets import PER_REPLICA, make
from unisono.bench.passes import Pass, fit_pass

_POLL_S = 0.02


def main(folder: Path, way: str, net: str, num_steps: int, num_replicas: int) -> None:
    import unisono

    rank = int(os.environ.get("BENCH_RANK", unisono.topology().rank))
    kind = way.partition("-")[0]
    one_pass = (_own(kind) or _peer(kind))(net, num_steps, num_replicas)
    one_pass()
    one_pass()
    (folder / f"{way}-ready-{rank}").touch()
    for number in range(1_000_000):
        if not wait_for(folder / f"{way}-{number}", folder / "end"):
            return
        start, cpu = time.perf_counter(), time.process_time()
        ended = one_pass()
        told = {
            "seconds": ended - start,
            "cpu_s": time.process_time() - cpu,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            **(one_pass.told() if isinstance(one_pass, Told) else {}),
        }
        part = folder / f"{way}-{number}-{rank}.part"
        part.write_text(json.dumps(told))
        part.rename(part.with_suffix(""))


def wait_for(file: Path, end: Path) -> bool:
    """Whether a file has appeared, and not the one that ends it all."""
    while not file.exists():
        if end.exists():
            return False
        time.sleep(_POLL_S)
    return True


def _own(kind: str) -> Callable[[str, int, int], Pass] | None:
    ways = {"plain": _plain, "apart": _plain, "one": _one, "inside": _inside}
    return {**ways, "together": _together}.get(kind)


def _peer(kind: str) -> Callable[[str, int, int], Pass]:
    from unisono.bench.peers import PEERS

    return PEERS[kind].start


def _plain(net: str, num_steps: int, num_replicas: int) -> Pass:
    """Keras alone, on the rows of so many replicas."""
    return _fit_of(make(net), net, num_steps, num_replicas)


def _one(net: str, num_steps: int, num_replicas: int) -> Pass:
    """unisono.parallel on one replica, which has the rows of so many."""
    import unisono

    return _fit_of(unisono.parallel(make(net), replicas=1), net, num_steps, num_replicas)


def _inside(net: str, num_steps: int, num_replicas: int) -> Pass:
    """unisono.parallel in one process."""
    import unisono

    model = unisono.parallel(make(net), replicas=num_replicas)
    return _fit_of(model, net, num_steps, num_replicas)


def _together(net: str, num_steps: int, num_replicas: int) -> Pass:
    """unisono.parallel in each of several processes."""
    import unisono

    model = unisono.parallel(make(net))
    return Told(model, _fit_of(model, net, num_steps, num_replicas))


class Told:
    """A pass that also tells where its time went."""

    def __init__(self, model: Any, fit: Pass) -> None:
        from unisono.launch.client import current_world

        self._model = model
        self._fit = fit
        self._world = current_world()
        self._waited_s = 0.0

    def __call__(self) -> float:
        before = self._num_waited()
        ended = self._fit()
        self._waited_s = self._num_waited() - before
        return ended

    def told(self) -> dict[str, float]:
        return {"waited_s": self._waited_s, "input_s": self._input_s()}

    def _num_waited(self) -> float:
        return 0.0 if self._world is None else self._world.waited_s

    def _input_s(self) -> float:
        """How long the batches of a pass take by themselves: none of them is trained on."""
        plain, ends = self._model.train_function, []

        def take(*args: Any) -> Any:
            *state, batches = args
            if not isinstance(batches, list):  # Keras on torch has taken them itself.
                next(batches)
            ends.append(time.perf_counter())
            return ({}, *state) if state else {}

        self._model.train_function = take
        try:
            self._fit()
        finally:
            self._model.train_function = plain
        return (ends[-1] - ends[0]) * len(ends) / max(1, len(ends) - 1)


def _fit_of(model: Any, net: str, num_steps: int, num_replicas: int) -> Pass:
    batch = PER_REPLICA[net] * num_replicas
    return fit_pass(model, net, batch * num_steps, batch)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
