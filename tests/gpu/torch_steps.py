"""Steps of torch replicas in a real run over gloo, and of plain Keras beside them, recorded."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

import unisono
from gpu import nets
from gpu.recorder import Record, recording

NUM_REPLICAS = 2
NUM_ROWS = 4
"""Of a replica: kernels, collectives and waits do not depend on it, nor on the size of images."""
IMAGE_SIZE = 32
NUM_WARM_UP = 2
CPU_LAYERS = "UNISONO_CPU_LAYERS"


@dataclass(frozen=True)
class Steps:
    """One step of the same net."""

    plain: Record
    parallel: Record
    num_gradient_bytes: int
    num_batch_norms: int


def run_nets(*names: str) -> list[dict[str, Steps]]:
    """Record nets in each process of a run."""
    return run(record_nets, names)


def run(function: Callable[..., Any], *args: Any) -> list[Any]:
    """What a function returns in each of two processes, with the layers that GPUs have."""
    before = os.environ.get(CPU_LAYERS)
    os.environ[CPU_LAYERS] = "0"
    try:
        return unisono.spawn(function, args, replicas=NUM_REPLICAS)
    finally:
        os.environ.pop(CPU_LAYERS)
        os.environ.update({} if before is None else {CPU_LAYERS: before})


def record_nets(names: Sequence[str]) -> dict[str, Steps]:
    return {name: record_net(name) for name in names}


def record_net(name: str) -> Steps:
    plain = _record(nets.make(name, IMAGE_SIZE), *nets.data(name, NUM_ROWS, IMAGE_SIZE))
    model = nets.make(name, IMAGE_SIZE)
    unisono.parallel(model)
    num_rows = NUM_ROWS * unisono.topology().world_size
    parallel = _record(model, *nets.data(name, num_rows, IMAGE_SIZE))
    variables = model.trainable_variables
    return Steps(
        plain,
        parallel,
        sum(int(v.value.nbytes) for v in variables),
        sum(isinstance(layer, keras.layers.BatchNormalization) for layer in model.layers),
    )


def _record(model: Any, x: Any, y: Any) -> Record:
    data = (keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y))
    for _ in range(NUM_WARM_UP):
        model.train_on_batch(x, y)
    # As `fit` calls it: `train_on_batch` reads the logs after each step.
    with recording() as record:
        model.train_function([data])
    return record
