"""torch: ops of a scope, and the devices of a tensor.

torch has one CPU device, so simulated GPUs share it. There a scope notes its name beside the memory
of each tensor that is made in it; tensors of before, and views of their memory, stay the CPU's.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from unisono.devices import Placement, simulated_gpus
from unisono.devices.locations import Location, location, names_of, num_bytes_of

CANNOT_LOG = "torch keeps no record of where each op ran"
_CPU = "cpu:0"
# By storage, which a variable shares with the tensor that it is made from. A weak reference keeps
# the address from being given to another storage, until it is forgotten here.
_names: dict[int, tuple[StorageWeakRef, str]] = {}
_num_names_after_cleaning = 0
adopted: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Models on replicas, as the engine keeps them: each has `variables()` and a `placement`."""


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
                stack.enter_context(_Naming(_name_in_scope(placement)))
        yield


def locate(values: Sequence[Any]) -> list[Location | None]:
    """Where values live; variables of models on replicas have a copy on each."""
    copies = {id(v): replicas.placement for replicas in adopted for v in replicas.variables()}
    return [_locate(value, copies) for value in values]


def _locate(value: Any, replicated: Mapping[int, Placement]) -> Location | None:
    tensor = value._value if isinstance(value, keras.Variable) else value
    if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
        return None
    shape = tuple(tensor.shape)
    num_bytes = num_bytes_of(shape, tensor.element_size())
    names = [_name(tensor)]
    if id(value) in replicated:
        names = names_of(replicated[id(value)])
    return location(shape, num_bytes, dict.fromkeys(names, num_bytes))


class _Naming(TorchFunctionMode):
    """Notes a name beside the memory that ops allocate."""

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
    """Of a CPU, simulated or not; ids above 0 are other names of the one that torch has."""
    return names_of(placement)[0] if placement.is_simulated else _CPU


def _address(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None  # Inside vmap and the like, a tensor has no memory of its own.


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, (tuple, list)):
        return [tensor for value in values for tensor in _tensors(value)]
    return []
