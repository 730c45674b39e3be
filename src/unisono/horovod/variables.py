"""Give the variables of one process to all."""

from collections.abc import Iterable
from typing import Any

import keras

from unisono.horovod.grouped import broadcast_all
from unisono.horovod.models import compiled_models
from unisono.horovod.process_sets import ProcessSet, global_process_set


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Set variables to the values that one process has.

    Takes variables of Keras, of TensorFlow, and tensors of torch; `inplace` is accepted, they are
    always set in place.

    >>> import keras, unisono.horovod as hvd
    >>> hvd.init()
    >>> variable = keras.Variable(1.0)
    >>> hvd.broadcast_variables([variable], root_rank=0)
    """
    _broadcast(variables, root_rank, None, process_set)


def broadcast_(
    variables: Iterable[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Set variables to the values that one process has, and return these values.

    >>> import keras, unisono.horovod as hvd
    >>> hvd.init()
    >>> [float(value) for value in hvd.broadcast_([keras.Variable(2.0)], root_rank=0)]
    [2.0]
    """
    return _broadcast(variables, root_rank, name, process_set)


def broadcast_global_variables(root_rank: int) -> None:
    """Set all variables of the models that a `DistributedOptimizer` trains, and its own.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.broadcast_global_variables(0)
    Traceback (most recent call last):
    ...
    RuntimeError: No model was compiled with a hvd.DistributedOptimizer...
    """
    models = compiled_models()
    if not models:
        raise RuntimeError(
            "No model was compiled with a hvd.DistributedOptimizer, and Keras keeps no list of all "
            "variables. Call hvd.broadcast_variables(model.variables, root_rank) instead."
        )
    for model in models:
        broadcast_variables(variables_of(model), root_rank)


def variables_of(model: Any) -> list[Any]:
    """The weights of a model and the variables of its optimizer, each once.

    The states of random generators are left out: each process draws its own numbers.
    """
    found = list(model.weights)
    if model.optimizer is not None:
        found += model.optimizer.variables
    return list({id(variable): variable for variable in found}.values())


def _broadcast(
    variables: Iterable[Any], root_rank: int, name: str | None, process_set: ProcessSet
) -> list[Any]:
    given = list(variables)
    names = [str(getattr(variable, "path", "") or "") for variable in given]
    values = [_value(variable) for variable in given]
    results = broadcast_all(values, root_rank, names, name, process_set)
    for variable, result in zip(given, results, strict=True):
        _assign(variable, result)
    return results


def _value(variable: Any) -> Any:
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return value.detach() if hasattr(value, "detach") else keras.ops.convert_to_tensor(value)


def _assign(variable: Any, value: Any) -> None:
    if hasattr(variable, "assign"):
        variable.assign(value)
    else:
        variable.data.copy_(value)
