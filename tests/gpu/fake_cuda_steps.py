"""Steps on GPUs that are not there, in a process of its own; prints what it finds as JSON.

python -m gpu.fake_cuda_steps [part ...]
"""

import json
import os
import sys
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

from gpu.fake_cuda import InlineExecutor, StandInWorkers, fake_gpus

NUM_ROWS = 8


def main(*names: str) -> None:
    parts = (steps, moved, failure, pickled, joined, steps_with_a_blocking_copy)
    found = {}
    with fake_gpus(4):
        import torch

        from unisono.backends.torch import batches, worker_pool

        worker_pool.Workers = StandInWorkers
        batches.ThreadPoolExecutor = InlineExecutor
        for part in parts:
            if not names or part.__name__ in names:
                torch.cuda.set_device(0)
                found[part.__name__] = part()
    print(json.dumps(found))


def steps() -> dict[str, Any]:
    import unisono
    from gpu.recorder import recording

    found = {}
    for is_parallel in (False, True):
        model, x, y = _net()
        if is_parallel:
            unisono.parallel(model, gpus=2)
        model.fit(x, y, batch_size=NUM_ROWS, verbose=0)
        with recording("cuda") as one:
            model.fit(x[:NUM_ROWS], y[:NUM_ROWS], batch_size=NUM_ROWS, verbose=0)
        with recording("cuda") as three:
            model.fit(x, y, batch_size=NUM_ROWS, verbose=0)
        # What a call does once is in both.
        found[is_parallel] = {
            k: n - one.waits[k] for k, n in three.waits.items() if n > one.waits[k]
        }
    return {"plain": found[False], "parallel": found[True]}


def steps_with_a_blocking_copy() -> dict[str, Any]:
    """What a careless change would do: a tensor of the host on the step's path."""
    import torch

    from unisono.backends.torch.replica import TorchReplica

    plain = TorchReplica.moments

    def moments(replica: Any, x: Any, mask: Any, axes: Any) -> Any:
        mean, variance = plain(replica, x, mask, axes)
        return mean * torch.ones(()).to(x.device), variance

    TorchReplica.moments = moments
    try:
        return steps()
    finally:
        TorchReplica.moments = plain


def moved() -> dict[str, Any]:
    """A model that was compiled, and trained, before it goes to other GPUs."""
    import unisono

    model, x, y = _net()
    model.fit(x, y, batch_size=NUM_ROWS, verbose=0)
    unisono.parallel(model, gpus=[2, 3])
    model.fit(x, y, batch_size=NUM_ROWS, verbose=0)
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return {"devices": sorted({str(variable.value.device) for variable in variables})}


def failure() -> dict[str, Any]:
    """A worker fails in the middle of `fit`, which no collective notices; then `fit` again."""
    import keras

    import unisono

    model, x, y = _net()
    unisono.parallel(model, gpus=2)
    model.fit(x, y, batch_size=NUM_ROWS, verbose=0)
    pool = vars(model)["_unisono"]._peers._pool
    group, (worker,) = pool._group, pool.workers
    fail = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batch == 0 and worker.fail(KeyError("in a worker"))
    )
    error = ""
    try:
        model.fit(x, y, batch_size=NUM_ROWS, verbose=0, callbacks=[fail])
    except KeyError as found:
        error = str(found)
    communicators = [group._group, group._in_background]
    again = model.fit(x, y, batch_size=NUM_ROWS, verbose=0).history
    return {
        "error": error,
        "are aborted": [each.is_aborted for each in communicators],
        "is restarted": pool.workers is not None and worker not in list(pool.workers),
        "again": list(again),
    }


def pickled() -> dict[str, Any]:
    """Tensors that are no variables, as an adapted layer has, arrive on the worker's GPU."""
    import keras
    import torch

    from unisono.backends.torch.model_pickle import pack, unpack

    torch.cuda.set_device(2)
    layer = keras.layers.Normalization()
    model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])
    layer.mean = layer.variance = torch.zeros((1, 4), device="cuda")
    data = pack(model)
    torch.cuda.set_device(0)
    copy, _ = unpack(data)
    found = copy.layers[0]
    return {"sent": str(layer.mean.device), "device": str(found.mean.device)}


def joined() -> dict[str, Any]:
    """A process of a run that sees all GPUs, as under torchrun and srun."""
    import torch

    from unisono.backends.torch.process_group import join
    from unisono.topology import Topology

    class World:
        topology = Topology(3, 4, local_rank=3, local_size=4)
        host = "127.0.0.1"

    join(World())
    return {"device": str(torch.zeros(1, device="cuda").device)}


def _net() -> Any:
    import keras
    import numpy as np
    from keras import layers

    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5),
            layers.BatchNormalization(),
            layers.Activation("tanh"),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    rows = np.zeros((3 * NUM_ROWS, 4), "float32")
    return model, rows, rows[:, :1]


if __name__ == "__main__":
    main(*sys.argv[1:])
