"""The device of a torch process: where Keras puts tensors, and where tensors live.

torch has one CPU device, so simulated GPUs share it. There a device scope records its name for the
storage of each tensor that is made in it; older tensors and views of their storage stay on "cpu:0".
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from unisono.backends.torch.model_pickle import replicated_variables
from unisono.devices import Placement, simulated_gpus
from unisono.devices.locations import Location, location, names_of, num_bytes_of
from unisono.keras_internals import torch_device
from unisono.replication.introspection import leaf_metrics

_CPU = "cpu:0"
# By storage, which a variable shares with the tensor that it is made from. The weak reference keeps
# the address from being reused by another storage until its entry is dropped.
_names: dict[int, tuple[StorageWeakRef, str]] = {}
_num_names_after_cleaning = 0
replicated: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Models on several replicas: each has `variables()` and a `placement`."""


def default_device() -> torch.device:
    """The device that Keras puts tensors on."""
    return torch.device(torch_device())


def move_to(model: keras.Model, placement: Placement) -> None:
    """Make the first GPU of a placement this process' device, and move the model to it."""
    if placement.kind != "gpu":
        return
    torch.cuda.set_device(placement.indices[0])
    metrics = [variable for metric in leaf_metrics(model) for variable in metric.variables]
    for variable in [*replicated_variables(model), *metrics]:
        if variable._value is not None:
            variable._value.data = variable._value.data.to(f"cuda:{placement.indices[0]}")


def generators() -> list[torch.Generator]:
    """Those that torch draws from by default."""
    device = default_device()
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


@contextmanager
def device_scope(placement: Placement) -> Iterator[None]:
    index = placement.indices[0]
    with ExitStack() as stack:
        if placement.kind == "gpu":
            stack.enter_context(torch.cuda.device(index))
            stack.enter_context(keras.device(f"cuda:{index}"))
        else:
            stack.enter_context(keras.device("cpu"))
            if simulated_gpus():
                stack.enter_context(_RecordDevice(_name_in_scope(placement)))
        yield


def locate(values: Sequence[Any]) -> list[Location | None]:
    """Where values live; a replicated model's variables have a copy on each replica."""
    placements = {id(v): trainer.placement for trainer in replicated for v in trainer.variables()}
    return [_locate(value, placements) for value in values]


def _locate(value: Any, placements: Mapping[int, Placement]) -> Location | None:
    tensor = value._value if isinstance(value, keras.Variable) else value
    if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
        return None
    shape = tuple(tensor.shape)
    num_bytes = num_bytes_of(shape, tensor.element_size())
    names = [_name(tensor)]
    if id(value) in placements:
        names = names_of(placements[id(value)])
    return location(shape, num_bytes, dict.fromkeys(names, num_bytes))


class _RecordDevice(TorchFunctionMode):
    """Records a device name for each storage that ops allocate."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [tensor for tensor in _tensors(result) if tensor.device.type == "cpu"]
        if made:
            known = {_address(tensor) for tensor in _tensors([*args, *(kwargs or {}).values()])}
            for tensor in made:
                if (address := _address(tensor)) not in known and address is not None:
                    _remember(address, tensor, self._name)
        return result


def _remember(address: int, tensor: torch.Tensor, name: str) -> None:
    global _num_names_after_cleaning
    if len(_names) > 2 * _num_names_after_cleaning + 1000:
        for old in [old for old, (reference, _) in _names.items() if reference.expired()]:
            del _names[old]
        _num_names_after_cleaning = len(_names)
    _names[address] = (StorageWeakRef(tensor.untyped_storage()), name)


def _name(tensor: torch.Tensor) -> str:
    if tensor.device.type == "cuda":
        return f"gpu:{tensor.device.index}"
    if tensor.device.type != "cpu":
        return f"{tensor.device.type}:{tensor.device.index or 0}"
    address = _address(tensor)
    return _names[address][1] if simulated_gpus() and address in _names else _CPU


def _name_in_scope(placement: Placement) -> str:
    """Of a CPU, simulated GPU or not; torch has one CPU whatever its index."""
    return names_of(placement)[0] if placement.is_simulated else _CPU


def _address(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None  # Inside vmap and the like, a tensor has no storage.


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, (tuple, list)):
        return [tensor for value in values for tensor in _tensors(value)]
    return []
