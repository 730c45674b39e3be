"""Send a model to another process: its structure as a pickle, without its values.

Keras' own pickling goes through its file format and fails on classes that are not registered, so
Keras objects are pickled by their attributes instead, and cloudpickle includes the classes and
functions of the user's script. Values of variables are left out: both sides list the variables in
the same order, and values are broadcast as tensors. What cannot be pickled is named by the path
that leads to it: `model.layers[2].augmenter._rng`.
"""

import functools
import io
import pickle
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import keras
import numpy as np
import torch
from keras.src.models.functional import Functional
from keras.src.models.model import inject_functional_model_class
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.utils import tracking
from keras.src.utils.backend_utils import DynamicBackend

from unisono.errors import ModelError
from unisono.keras_internals import torch_device
from unisono.pickling import reduce_module
from unisono.replication.introspection import optimizers_of, rename_variables, with_inner

# Left on a model by a training call: functions made for this process, and references to the data.
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
_STACK_BYTES = 512 * 2**20  # Reserved, not used: the system maps pages as they are touched.
_NUM_LATEST = 100
_SETTINGS = ("floatx", "epsilon", "image_data_format")
# Of lookup layers, which use TensorFlow on every backend.
_TABLES = ("StaticHashTable", "MutableHashTable")
_MOST_OBJECTS = 200_000
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType)
_TRACKED = (tracking.TrackedList, tracking.TrackedDict, tracking.TrackedSet)


def pack(model: keras.Model) -> bytes:
    """The structure of a model, compiled state included, without its values."""
    buffer = io.BytesIO()
    content = (model, replicated_variables(model), _settings())
    packer = _Packer(buffer, model)
    try:
        _with_deep_stack(lambda: packer.dump(content))
    except Exception as error:  # Whatever an object raises that cannot be pickled.
        raise _cannot_send(model, packer, error) from error
    return buffer.getvalue()


def _cannot_send(model: keras.Model, packer: "_Packer", error: Exception) -> ModelError:
    paths = _paths_from(model)
    found = next((obj for obj in reversed(packer.latest) if id(obj) in paths), None)
    where = "" if found is None else f"{paths[id(found)]} is a {type(found).__name__}: "
    return ModelError(
        f"The model {model.name!r} cannot be sent to the processes of the other replicas, since "
        f"not all of it can be pickled: {where}{error}. Keep open files, locks, generators and the "
        "like off the model, its layers, losses and optimizer, or start the program with `unisono "
        "run --replicas N`: every process then makes its own model, and nothing is pickled."
    )


def unpack(data: bytes) -> tuple[keras.Model, list[keras.Variable]]:
    """A model and its `replicated_variables`, in that order, with values not yet set."""
    model, variables, settings = _Unpacker(io.BytesIO(data)).load()
    _apply(settings)
    _renumber(model)
    return model, variables


def replicated_variables(model: keras.Model) -> list[keras.Variable]:
    """The variables that all replicas must agree on: the model's and its optimizers'."""
    variables = list(model.variables)
    for optimizer in optimizers_of(model):
        variables += optimizer.variables
    return variables


class _Packer(cloudpickle.Pickler):  # type: ignore[misc, unused-ignore]
    def __init__(self, buffer: io.BytesIO, model: keras.Model) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        variables = [*replicated_variables(model), *model.metrics_variables]
        self._parameters = {id(v._value): v for v in variables if v._value is not None}
        self.latest: deque[Any] = deque(maxlen=_NUM_LATEST)
        """The objects that were pickled last, for an error to name."""

    def persistent_id(self, obj: Any) -> Any:
        variable = self._parameters.get(id(obj)) if isinstance(obj, torch.Tensor) else None
        if variable is None:
            return None
        return id(obj), tuple(obj.shape), obj.dtype, obj.requires_grad

    def reducer_override(self, obj: Any) -> Any:
        self.latest.append(obj)
        if isinstance(obj, type):
            return super().reducer_override(obj)
        if (module := reduce_module(obj)) is not None:
            return module
        if isinstance(obj, KerasSaveable):
            make = _blank_functional if isinstance(obj, Functional) else _blank
            return make, (type(obj),), dict(_attributes(obj)), None, None, _set_attributes
        if isinstance(obj, torch.Tensor) and obj.device.type == "cuda":
            # A worker sees one GPU, by another number.
            return _on_own_device, (obj.detach().cpu(), type(obj), obj.requires_grad)
        if isinstance(obj, torch.device) and obj.type == "cuda":
            return torch.device, ("cuda",)
        if isinstance(obj, DynamicBackend):
            return DynamicBackend, (obj._backend,)
        if isinstance(obj, _TRACKED):
            content = (vars(obj), list(obj.items()) if isinstance(obj, dict) else list(obj))
            return _blank, (type(obj),), content, None, None, _set_tracked
        if type(obj).__name__ in _TABLES and isinstance(obj, _table_classes()):
            return _table, (type(obj).__name__, *_content_of(obj))
        return super().reducer_override(obj)


class _Unpacker(pickle.Unpickler):
    """Only ever reads what `_Packer` wrote in the process that started this one."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self._parameters: dict[int, torch.nn.Parameter] = {}

    def persistent_load(self, key: Any) -> torch.nn.Parameter:
        number, shape, dtype, requires_grad = key
        if number not in self._parameters:
            tensor = torch.zeros(shape, dtype=dtype, device=torch_device())
            self._parameters[number] = torch.nn.Parameter(tensor, requires_grad=requires_grad)
        return self._parameters[number]


def _with_deep_stack(function: Callable[[], Any]) -> None:
    """Run a function that recurses from layer to layer, however many there are."""
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
    # Neither __init__ nor a class's own __new__: both may need arguments.
    base: Any = next((kind for kind in (list, dict, set) if issubclass(cls, kind)), object)
    return base.__new__(cls)


def _blank_functional(cls: type) -> Any:
    # Keras makes a user's class functional when it is called with inputs and outputs, which has
    # not happened in this process.
    if not issubclass(cls, Functional):
        inject_functional_model_class(cls)
    return _blank(cls)


def _on_own_device(tensor: torch.Tensor, kind: type, requires_grad: bool) -> torch.Tensor:
    own = tensor.to(torch_device())
    if issubclass(kind, torch.nn.Parameter):
        return torch.nn.Parameter(own, requires_grad)
    return own.requires_grad_(requires_grad)


def _set_attributes(obj: Any, attributes: dict[str, Any]) -> None:
    vars(obj).update(attributes)


def _set_tracked(obj: Any, content: tuple[dict[str, Any], list[Any]]) -> None:
    attributes, items = content
    vars(obj).update(attributes)
    # Not by the object's own methods, which would report each item to the tracker again.
    if isinstance(obj, list):
        list.extend(obj, items)
    elif isinstance(obj, dict):
        dict.update(obj, items)
    else:
        set.update(obj, items)


def _table_classes() -> tuple[type, ...]:
    import tensorflow as tf

    return tf.lookup.StaticHashTable, tf.lookup.experimental.MutableHashTable


def _content_of(table: Any) -> tuple[Any, ...]:
    keys, values = (np.asarray(part) for part in table.export())
    order = np.argsort(keys)  # So that the same table gives the same bytes each time.
    kinds = (table.key_dtype.name, table.value_dtype.name)
    return *kinds, keys[order], values[order], np.asarray(table._default_value)


def _table(kind: str, key_dtype: str, value_dtype: str, keys: Any, values: Any, other: Any) -> Any:
    import tensorflow as tf

    keys, values = tf.constant(keys, key_dtype), tf.constant(values, value_dtype)
    if kind == "StaticHashTable":
        initial = tf.lookup.KeyValueTensorInitializer(keys, values)
        return tf.lookup.StaticHashTable(initial, other)
    table = tf.lookup.experimental.MutableHashTable(key_dtype, value_dtype, other)
    table.insert(keys, values)
    return table


def _renumber(model: keras.Model) -> None:
    """Optimizers key variables by id, which differs in this process."""
    for optimizer in with_inner(optimizers_of(model)):
        ids = [optimizer._var_key(variable) for variable in optimizer._trainable_variables]
        places = optimizer._trainable_variables_indices
        rename_variables(optimizer, {key: ids[place] for key, place in places.items()})


def _settings() -> dict[str, Any]:
    values = {name: getattr(keras.config, name)() for name in _SETTINGS}
    return values | {"dtype_policy": keras.config.dtype_policy().name}


def _apply(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        getattr(keras.config, f"set_{name}")(value)


# -- the path to an object ------------------------------------------------------------------------


def _paths_from(model: keras.Model) -> dict[int, str]:
    """The shortest path to each object that a model leads to, by the object's id."""
    paths = {id(model): "model"}
    # First by the names that a user knows, then by those of Keras.
    ahead: deque[Any] = deque([model])
    for index, layer in enumerate(model.layers):
        paths[id(layer)] = f"model.layers[{index}]"
        ahead.append(layer)
    while ahead and len(paths) < _MOST_OBJECTS:
        obj = ahead.popleft()
        for step, value in _steps(obj):
            if isinstance(value, _ATOMS) or id(value) in paths:
                continue
            paths[id(value)] = paths[id(obj)] + step
            ahead.append(value)
    return paths


def _steps(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
        obj = obj.__func__
    if isinstance(obj, types.FunctionType):
        for name, value in _captured(obj):
            yield f" (its variable {name!r})", value
        for name, value in _defaults(obj):
            yield f" (its parameter {name!r})", value
    elif isinstance(obj, functools.partial):
        yield ".func", obj.func
        yield ".args", obj.args
        yield ".keywords", obj.keywords
    elif isinstance(obj, dict):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    if hasattr(obj, "__dict__"):
        yield from ((f".{name}", value) for name, value in _attributes(obj))
    if "<locals>" in type(obj).__qualname__:  # A class that is pickled with its methods.
        methods = vars(type(obj)).items()
        yield from ((f".{n}", each) for n, each in methods if isinstance(each, types.FunctionType))


def _defaults(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    values = function.__defaults__ or ()
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    yield from zip(positional[len(positional) - len(values) :], values, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _captured(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function refers to when it is pickled by value."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # Not assigned yet.
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
