"""Steps of torch replicas in a real run over gloo, and of plain Keras beside them, recorded."""

from dataclasses import dataclass
from typing import Any

import keras
from nets import batch, make
from recorder import Record, recording

import unisono

NUM_ROWS = 4
"""Of a replica."""
NUM_WARM_UP = 2


@dataclass(frozen=True)
class Steps:
    """One step of the same net."""

    plain: Record
    parallel: Record
    num_gradient_bytes: int
    num_batch_norms: int


def record_nets(names: tuple[str, ...]) -> dict[str, Steps]:
    """In each process of a run."""
    return {name: record_net(name) for name in names}


def record_net(name: str) -> Steps:
    plain = _record(make(name), *batch(name, NUM_ROWS))
    model = make(name)
    unisono.parallel(model)
    parallel = _record(model, *batch(name, NUM_ROWS * unisono.topology().world_size))
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
