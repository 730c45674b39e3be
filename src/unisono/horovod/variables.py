"""Variables and Python objects broadcast from one process to all.

The pickle of an object is transferred by the backend's collective, and its checksum by the run's
rendezvous server, which only processes with the run's secret can talk to. An object is unpickled
only if the two agree, so that no data of anyone else on the network is ever executed.
"""

import hashlib
import pickle
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from unisono.errors import LaunchError
from unisono.horovod.collectives import broadcast_all
from unisono.horovod.execution import Collective, run
from unisono.horovod.models import compiled_models
from unisono.horovod.session import ProcessSet, check_member, global_process_set
from unisono.pickling import dumps


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Set variables to the values of one process.

    Takes variables of Keras and TensorFlow and tensors of torch. `inplace` is accepted: they are
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
    """Set variables to the values of one process, and return these values.

    >>> import keras, unisono.horovod as hvd
    >>> hvd.init()
    >>> [float(value) for value in hvd.broadcast_([keras.Variable(2.0)], root_rank=0)]
    [2.0]
    """
    return _broadcast(variables, root_rank, name, process_set)


def broadcast_global_variables(root_rank: int) -> None:
    """Broadcast all variables of models with a `DistributedOptimizer`, and of the optimizer.

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

    Without the states of random generators: each process draws its own numbers.
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


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """One process' object, in all processes; `session` is accepted and ignored.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.broadcast_object({"epoch": 3})
    {'epoch': 3}
    """
    members = check_member(process_set)
    is_root = members.ranks[members.rank() or 0] == root_rank
    data = dumps(obj) if is_root else b""
    # An all-gather in which only the root has rows, so that no process needs the size beforehand.
    collective = Collective(
        "allgather", process_set, name or "broadcast_object", root=int(root_rank)
    )
    every = _gather(data, collective)
    if is_root:
        return obj
    return pickle.loads(every[members.ranks.index(root_rank)])


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Every process' object, in the order of ranks; `session` is accepted and ignored.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.allgather_object("a")
    ['a']
    """
    collective = Collective("allgather", process_set, name or "allgather_object")
    return [pickle.loads(each) for each in _gather(dumps(obj), collective)]


def _gather(data: bytes, collective: Collective) -> list[bytes]:
    """Every process' bytes, checked against the checksum that it sent."""
    rows = keras.ops.convert_to_tensor(np.frombuffer(data, "uint8").copy(), "uint8")
    note = [len(data), hashlib.sha256(data).hexdigest()]
    (joined,), notes = run(collective, [rows], note=note)
    everything = keras.ops.convert_to_numpy(joined).astype("uint8").tobytes()
    parts, begin = [], 0
    for rank, (num_bytes, checksum) in zip(collective.process_set.ranks, notes, strict=True):
        part = everything[begin : begin + num_bytes]
        begin += num_bytes
        if hashlib.sha256(part).hexdigest() != checksum:
            raise LaunchError(
                f"The object of rank {rank} arrived with another checksum than it was sent with, "
                "and was not unpickled. Look for a process that does not belong to this run."
            )
        parts.append(part)
    return parts
