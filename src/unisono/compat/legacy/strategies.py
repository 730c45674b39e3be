"""`multi_gpu_model` and `MirroredStrategy` for programs that run as they were written.

Processes of `unisono run`, and the only one of it too, have been given their devices: what a
program says of GPUs is then known already.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono.compat import mirrored, multi_gpu
from unisono.compat.knowledge import METHODS
from unisono.compat.legacy.lines import announce
from unisono.parallel import parallel
from unisono.topology import topology

_WRITE = {method.old: method.write for method in METHODS}


def multi_gpu_model(
    model: Any,
    gpus: int | Sequence[int] | None = None,
    cpu_merge: bool = True,
    cpu_relocation: bool = False,
) -> Any:
    """`unisono.compat.multi_gpu_model`, also in a run of one process."""
    if is_shared_out():
        return parallel(model)
    return multi_gpu.multi_gpu_model(model, gpus, cpu_merge, cpu_relocation)


class MirroredStrategy(mirrored.MirroredStrategy):
    """`unisono.compat.MirroredStrategy`, whose old methods say what they are called today."""

    def __init__(self, devices: Sequence[str] | None = None, cross_device_ops: Any = None) -> None:
        super().__init__(None if is_shared_out() else devices, cross_device_ops)

    def experimental_run_v2(
        self,
        step: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        announce("strategy.experimental_run_v2", _WRITE["experimental_run_v2"])
        return self.run(step, args, kwargs)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        old = "experimental_distribute_dataset"
        announce(f"strategy.{old}", _WRITE[old])
        return self.distribute_dataset(dataset)


def is_shared_out() -> bool:
    """Whether this process was started with devices of its own."""
    facts = topology()
    return facts.world_size > 1 or facts.launcher == "unisono"
