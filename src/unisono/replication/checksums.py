"""Checksums of the values that a replica holds, to compare replicas by."""

import zlib
from typing import Any

import keras
import numpy as np

from unisono.replication.framework import framework
from unisono.replication.introspection import optimizers_of


def compared_variables(model: Any) -> list[Any]:
    """A model's weights and the state of its optimizers; streams of random numbers differ."""
    variables = list(model.variables)
    for optimizer in optimizers_of(model):
        variables += optimizer.variables
    known = {id(v): v for v in variables if v.name != "seed_generator_state"}
    return list(known.values())


def names_of(model: Any) -> list[str]:
    return [
        *(str(variable.path) for variable in compared_variables(model)),
        *(name for name, _ in framework().native_optimizer_state(model)),
    ]


def checksum(value: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(np.asarray(value)).tobytes())


def own_checksums(model: Any) -> list[int]:
    """Of the values that this process holds."""
    native = framework().native_optimizer_state(model)
    values = [*compared_variables(model), *(value for _, value in native)]
    return [checksum(keras.ops.convert_to_numpy(value)) for value in values]
