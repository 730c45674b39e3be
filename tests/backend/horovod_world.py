"""Run by test_horovod.py in two processes: calls of unisono.horovod, their results as JSON.

`python horovod_world.py FOLDER [check ...]`; FOLDER is for files. The checks of training are in
horovod_training.py.
"""

import json
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
from horovod_models import FACTOR, SCALED

import unisono
import unisono.horovod as hvd

told = {}
try:
    hvd.rank()
except ValueError as error:
    told["before"] = str(error)
hvd.init()

import horovod_training

BACKEND = keras.backend.backend()
rank = hvd.rank()


def plain(value):
    """Tensors as lists."""
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, (int, float, str, bool, dict)) or value is None:
        return value
    return np.asarray(keras.ops.convert_to_numpy(value)).astype("float64").tolist()


def refusal(call):
    """What a call that must fail raises."""
    try:
        return f"no error: {plain(call())}"
    except Exception as error:
        kind = horovod_kind(error)
        return f"{type(error).__name__}{kind}: {error}"


def horovod_kind(error):
    """Which of the errors that Horovod raises for a mismatch this is also one of."""
    if not isinstance(error, unisono.errors.DisagreementError):
        return ""
    if BACKEND != "tensorflow":
        return " (RuntimeError)" if isinstance(error, RuntimeError) else ""
    import tensorflow as tf

    kinds = (tf.errors.FailedPreconditionError, tf.errors.InvalidArgumentError)
    return "".join(f" ({kind.__name__})" for kind in kinds if isinstance(error, kind))


def check_processes():
    return {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "local": [hvd.local_rank(), hvd.local_size()],
        "cross": [hvd.cross_rank(), hvd.cross_size()],
        "is_homogeneous": hvd.is_homogeneous(),
        "mpi": [hvd.mpi_built(), hvd.mpi_enabled()],
        "draw": float(np.random.rand()),
    }


def check_allreduce():
    value = np.array([[1.0, 2.0], [3.0, 4.0]], "float32") * (rank + 1)
    results = {
        op.name: hvd.allreduce(value, op=op)
        for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)
    }
    results["default"] = hvd.allreduce(value)
    results["scalar"] = hvd.allreduce(float(rank), op=hvd.Sum)
    results["scaled"] = hvd.allreduce(value, prescale_factor=0.5, postscale_factor=3.0, op=hvd.Sum)
    third = np.array([1 / 3], "float32")
    results["fp16"] = hvd.allreduce(third, op=hvd.Sum, compression=hvd.Compression.fp16)
    results["grouped"] = hvd.grouped_allreduce([value, np.array([rank], "int32")], op=hvd.Sum)
    results["no tensors"] = hvd.grouped_allreduce([])
    return {name: plain(result) for name, result in results.items()}


def check_types():
    """Each type's sum and average, with the type that comes back."""
    found = {}
    for dtype in ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8", "int8"):
        if BACKEND == "jax" and dtype in ("float64", "int64"):
            continue
        tensor = keras.ops.cast(keras.ops.convert_to_tensor([1, 3 + rank]), dtype)
        total, mean = hvd.allreduce(tensor, op=hvd.Sum), hvd.allreduce(tensor)
        found[dtype] = [plain(total), plain(mean), keras.backend.standardize_dtype(mean.dtype)]
    negative = np.array([-2 - rank], "int32")
    found["negative"] = plain(hvd.allreduce(negative))
    found["bool"] = plain(hvd.broadcast(np.array([rank == 1]), 1))
    return found


def check_scales():
    """Half precision and whole numbers times a factor that is in none of these types."""
    found = {}
    for dtype in ("float16", "float32", "int8", "int32"):
        tensor = keras.ops.cast(keras.ops.convert_to_tensor(SCALED), dtype)
        scatter = {"op": hvd.Sum, "postscale_factor": FACTOR}
        results = {
            "before": hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=FACTOR),
            "after": hvd.allreduce(tensor, op=hvd.Sum, postscale_factor=FACTOR),
            "scattered": hvd.grouped_reducescatter([tensor, tensor], **scatter)[1],
        }
        found[dtype] = {name: plain(result) for name, result in results.items()}
    return found


def check_rows():
    own = np.full((rank + 1, 2), rank, "float32")
    rows, received = hvd.alltoall(
        np.arange(3, dtype="float32") + 10 * rank, splits=[1, 2] if rank == 0 else [3, 0]
    )
    five = np.arange(5, dtype="float32") * (rank + 1)
    results = {
        "allgather": hvd.allgather(own),
        "grouped": hvd.grouped_allgather([own, own[:1]]),
        "broadcast": hvd.broadcast(own[:1], root_rank=1),
        "alltoall": [rows, received],
        "equal": hvd.alltoall(np.arange(4, dtype="float32") + 10 * rank),
        "reducescatter": hvd.reducescatter(five, op=hvd.Sum),
        "average": hvd.reducescatter(five),
        "grouped scatter": hvd.grouped_reducescatter([five, five[:2]], op=hvd.Sum),
        "nothing": hvd.allgather(own[:0]),
    }
    return {name: plain(result) for name, result in results.items()}


def check_objects():
    class Note:
        def __init__(self, text):
            self.text = text

    given = hvd.broadcast_object(Note(f"from {rank}"), root_rank=1)
    every = hvd.allgather_object({"rank": rank, "set": {1, 2}, "pad": "x" * 100 * rank})
    numbers = np.full((2,), rank + 5.0, "float32")
    variables = [keras.Variable(numbers), keras.Variable(rank, trainable=False)]
    hvd.broadcast_variables(variables, root_rank=1)
    in_place = [keras.Variable(numbers), keras.Variable(numbers[:1])]
    returned = hvd.broadcast_(in_place, 0)
    return {
        "in place": [plain(in_place), plain(returned)],
        "given": given.text,
        "every": [each["rank"] for each in every],
        "sets": [sorted(each["set"]) for each in every],
        "variables": plain(variables),
    }


def check_sets():
    alone = hvd.add_process_set([rank_of_one := 1])
    both = hvd.global_process_set
    results = {
        "sizes": [both.size(), alone.size()],
        "ranks": [both.rank(), alone.rank()],
        "included": alone.included(),
        "outside": refusal(lambda: hvd.allreduce(1.0, process_set=alone)),
        "unregistered": refusal(lambda: hvd.allreduce(1.0, process_set=hvd.ProcessSet([0]))),
        "twice": refusal(lambda: hvd.add_process_set([1])),
        "unknown": refusal(lambda: hvd.add_process_set([7])),
        "differ": refusal(lambda: hvd.add_process_set([rank])),
    }
    results["removed"] = hvd.remove_process_set(alone)
    results["again"] = hvd.remove_process_set(alone)
    hvd.barrier()
    return results | {"one": rank_of_one}


def check_mismatches():
    ones = np.ones((2, 3), "float32")
    other = hvd.allreduce if rank == 0 else hvd.allgather
    calls = {
        "shapes": lambda: hvd.allreduce(ones if rank == 0 else ones.T),
        "types": lambda: hvd.allreduce(ones.astype("float32" if rank == 0 else "int32")),
        "ops": lambda: hvd.allreduce(ones, op=hvd.Sum if rank == 0 else hvd.Max),
        "scales": lambda: hvd.allreduce(ones, prescale_factor=1.0 + rank),
        "roots": lambda: hvd.broadcast(ones, root_rank=rank),
        "unknown root": lambda: hvd.broadcast(ones, root_rank=7 * rank),
        "names": lambda: hvd.allreduce(ones, name="a" if rank == 0 else "b"),
        "kinds": lambda: other(ones),
        "counts": lambda: hvd.allreduce(ones) if rank == 0 else hvd.broadcast(ones, 0),
        "columns": lambda: hvd.allgather(ones[:, : 2 + rank]),
        "scalars": lambda: hvd.allgather(1.0),
        "numbers": lambda: hvd.grouped_allreduce([ones] * (1 + rank)),
        "splits": lambda: hvd.alltoall(ones, splits=[1, 1] if rank == 0 else [1, 9]),
        "objects": lambda: hvd.broadcast_object(1, root_rank=rank),
        "metrics": lambda: hvd.callbacks.MetricAverageCallback().on_epoch_end(
            0, {"loss": 1.0} if rank == 0 else {"mae": 1.0}
        ),
        "adasum": lambda: hvd.allreduce(ones, op=hvd.Adasum),
        "both": lambda: hvd.allreduce(ones, op=hvd.Sum, average=True),
    }
    results = {name: refusal(call) for name, call in calls.items()}
    # After all of that, the processes still understand each other.
    results["after"] = plain(hvd.allreduce(float(rank), op=hvd.Sum))
    return results


def check_join():
    """Rank 0 has two values to reduce, rank 1 has three."""
    sums = [plain(hvd.allreduce([1.0, 2.0], op=hvd.Sum)) for _ in range(2 + rank)]
    last = hvd.join()
    refused = refusal(lambda: hvd.allgather([1.0]) if rank else hvd.join())
    return {"sums": sums, "last": last, "refused": refused, "again": hvd.join()}


def check_timeline():
    path = Path(tempfile.mkdtemp(), "timeline.json")
    hvd.start_timeline(str(path))
    for _ in range(2):
        hvd.allreduce([1.0], name="first")
    hvd.grouped_allreduce([[1.0], [2.0]], name="second")
    hvd.barrier()
    hvd.stop_timeline()
    return json.loads(path.read_text()) if path.exists() else None


if __name__ == "__main__":
    CHECKS = {
        name.removeprefix("check_"): function
        for functions in (dict(globals()), vars(horovod_training))
        for name, function in functions.items()
        if name.startswith("check_")
    }
    for name in sys.argv[2:] or CHECKS:
        told[name] = CHECKS[name]()
    print(json.dumps(told))
