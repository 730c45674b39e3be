"""Objects of Python given from one process to others, as Horovod's users expect: any that pickles.

The pickle travels through the backend's collective. Its checksum travels through the run's meeting
point, which only processes that prove the run's secret can talk to: an object is unpickled only
if the two agree, so nothing that a stranger put on the network is ever run.
"""

import hashlib
import pickle
from typing import Any

import keras
import numpy as np

from unisono.errors import LaunchError
from unisono.horovod.execution import Collective, run
from unisono.horovod.process_sets import ProcessSet, check_member, global_process_set
from unisono.pickling import dumps


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """One process' object, in all of them; `session` is accepted and not needed.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.broadcast_object({"epoch": 3})
    {'epoch': 3}
    """
    members = check_member(process_set)
    is_root = members.ranks[members.rank() or 0] == root_rank
    data = dumps(obj) if is_root else b""
    # A gather to which all but the root give nothing: so nobody need know the size beforehand.
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
    """Every process' object, in the order of ranks; `session` is accepted and not needed.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.allgather_object("a")
    ['a']
    """
    collective = Collective("allgather", process_set, name or "allgather_object")
    return [pickle.loads(each) for each in _gather(dumps(obj), collective)]


def _gather(data: bytes, collective: Collective) -> list[bytes]:
    """Every process' bytes, checked against what it said that it would send."""
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
                "and was not unpickled. Look for a process that is no part of this run."
            )
        parts.append(part)
    return parts
