"""Carry a model to another process: its structure as a pickle, its values apart.

Keras' own pickling goes through its file format and fails on classes that are not registered, so
Keras objects are taken apart by their attributes instead, and cloudpickle brings the classes and
functions of the user's script along. The values of variables are left out: both sides list them in
the same order, and they travel as tensors.
"""

import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import keras
import torch
from keras.src.backend.torch.core import Variable
from keras.src.models.functional import Functional
from keras.src.models.model import inject_functional_model_class
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.utils import tracking
from keras.src.utils.backend_utils import DynamicBackend

from unisono.engines.parts import optimizers_of, rename_variables, with_inner
from unisono.errors import ModelError

# What a training call leaves on a model and a replica must not get: functions made for this
# process, and objects that lead to the data.
_LEFT_BEHIND = {
    "train_function",
    "test_function",
    "predict_function",
    "history",
    "stop_training",
    "stop_evaluating",
    "stop_predicting",
    "_eval_epoch_iterator",
    "_unisono",
}
_STACK_BYTES = 512 * 2**20  # Reserved, not used up: the system hands out pages as they are touched.
_TRACKED = (tracking.TrackedList, tracking.TrackedDict, tracking.TrackedSet)


def pack(model: keras.Model) -> bytes:
    """The structure of a model, compiled state included, without its values."""
    buffer = io.BytesIO()
    content = (model, carried_variables(model), _settings())
    try:
        _with_deep_stack(lambda: _Packer(buffer, model).dump(content))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise ModelError(
            f"The model {model.name!r} cannot be sent to the processes of the other replicas: "
            f"{error}. Keep open files, locks and the like off the model, its layers and losses."
        ) from error
    return buffer.getvalue()


def unpack(data: bytes) -> tuple[keras.Model, list[Variable]]:
    """A model and its variables, in the order of `carried_variables`, with values not yet set."""
    model, variables, settings = _Unpacker(io.BytesIO(data)).load()
    _apply(settings)
    _renumber(model)
    return model, variables


def carried_variables(model: keras.Model) -> list[Variable]:
    """The variables that all replicas must agree on: the model's and its optimizers'."""
    variables = list(model.variables)
    for optimizer in optimizers_of(model):
        variables += optimizer.variables
    return variables


class _Packer(cloudpickle.Pickler):  # type: ignore[misc, unused-ignore]
    def __init__(self, buffer: io.BytesIO, model: keras.Model) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        variables = [*carried_variables(model), *model.metrics_variables]
        self._parameters = {id(v._value): v for v in variables if v._value is not None}

    def persistent_id(self, obj: Any) -> Any:
        variable = self._parameters.get(id(obj)) if isinstance(obj, torch.Tensor) else None
        if variable is None:
            return None
        return id(obj), tuple(obj.shape), obj.dtype, obj.requires_grad

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            return super().reducer_override(obj)
        if isinstance(obj, Functional):
            return (
                _blank_functional,
                (type(obj),),
                dict(_attributes(obj)),
                None,
                None,
                _set_attributes,
            )
        if isinstance(obj, KerasSaveable):
            return _blank, (type(obj),), dict(_attributes(obj)), None, None, _set_attributes
        if isinstance(obj, DynamicBackend):
            return DynamicBackend, (obj._backend,)
        if isinstance(obj, _TRACKED):
            content = (vars(obj), list(obj.items()) if isinstance(obj, dict) else list(obj))
            return _blank, (type(obj),), content, None, None, _set_tracked
        return super().reducer_override(obj)


class _Unpacker(pickle.Unpickler):
    """Only ever reads what `_Packer` wrote in the process that started this one."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self._parameters: dict[int, torch.nn.Parameter] = {}

    def persistent_load(self, key: Any) -> torch.nn.Parameter:
        number, shape, dtype, requires_grad = key
        if number not in self._parameters:
            tensor = torch.zeros(
                shape, dtype=dtype, device=keras.src.backend.torch.core.get_device()
            )
            self._parameters[number] = torch.nn.Parameter(tensor, requires_grad=requires_grad)
        return self._parameters[number]


def _with_deep_stack(function: Callable[[], Any]) -> None:
    """Run a function that descends from layer to layer, however many there are."""
    errors = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    limit, stack = sys.getrecursionlimit(), threading.stack_size(_STACK_BYTES)
    sys.setrecursionlimit(max(limit, 200_000))
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(stack)
        sys.setrecursionlimit(limit)
    if errors:
        raise errors[0]


def _attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(obj).items():
        if name in _LEFT_BEHIND or getattr(value, "is_unisono_hook", False):
            continue
        yield name, value


def _blank(cls: type) -> Any:
    # Neither __init__ nor a class's own __new__: both may want arguments.
    base: Any = next((kind for kind in (list, dict, set) if issubclass(cls, kind)), object)
    return base.__new__(cls)


def _blank_functional(cls: type) -> Any:
    # Keras makes a user's class a functional one when it is called with inputs and outputs, which
    # a class that was imported here has never been.
    if not issubclass(cls, Functional):
        inject_functional_model_class(cls)
    return _blank(cls)


def _set_attributes(obj: Any, attributes: dict[str, Any]) -> None:
    vars(obj).update(attributes)


def _set_tracked(obj: Any, content: tuple[dict[str, Any], list[Any]]) -> None:
    attributes, items = content
    vars(obj).update(attributes)
    # Not through the object's own methods: they would report each item to the tracker again.
    if isinstance(obj, list):
        list.extend(obj, items)
    elif isinstance(obj, dict):
        dict.update(obj, items)
    else:
        set.update(obj, items)


def _renumber(model: keras.Model) -> None:
    """Optimizers know variables by id, which is another one in this process."""
    for optimizer in with_inner(optimizers_of(model)):
        ids = [optimizer._var_key(variable) for variable in optimizer._trainable_variables]
        places = optimizer._trainable_variables_indices
        rename_variables(optimizer, {key: ids[place] for key, place in places.items()})


def _settings() -> dict[str, Any]:
    return {
        "floatx": keras.config.floatx(),
        "epsilon": keras.config.epsilon(),
        "image_data_format": keras.config.image_data_format(),
        "dtype_policy": keras.config.dtype_policy().name,
    }


def _apply(settings: dict[str, Any]) -> None:
    keras.config.set_floatx(settings["floatx"])
    keras.config.set_epsilon(settings["epsilon"])
    keras.config.set_image_data_format(settings["image_data_format"])
    keras.config.set_dtype_policy(settings["dtype_policy"])
