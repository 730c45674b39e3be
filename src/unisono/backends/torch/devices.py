"""The device of a torch process: where Keras puts tensors, and bringing values there."""

from typing import Any

import keras
import torch

from unisono.backends.torch.model_pickle import carried_variables
from unisono.devices import Placement
from unisono.keras_internals import torch_device


def default_device() -> torch.device:
    """The device that Keras puts tensors on."""
    return torch.device(torch_device())


def as_tensor(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, torch.Tensor):
        return leaf
    return keras.ops.convert_to_tensor(leaf)


def move_to(model: keras.Model, placement: Placement) -> None:
    """Make the first GPU of a placement this process' device, and bring the model there."""
    if placement.kind != "gpu":
        return
    torch.cuda.set_device(placement.indices[0])
    for variable in carried_variables(model):
        if variable._value is not None:
            variable._value.data = variable._value.data.to(f"cuda:{placement.indices[0]}")


def generators() -> list[torch.Generator]:
    """Those that torch draws from where none is named."""
    device = default_device()
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]
