"""Run by test_horovod.py in three processes: process sets, and ranks that wait crosswise."""

import json

import keras
import numpy as np

import unisono.horovod as hvd

even = hvd.ProcessSet([2, 0])
hvd.init(process_sets=[even])
rank = hvd.rank()
told = {"rank": rank, "place": even.rank(), "included": even.included()}


def refusal(call):
    try:
        return f"no error: {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def numbers(tensor):
    return np.asarray(keras.ops.convert_to_numpy(tensor), "float64").tolist()


if even.included():
    own = np.full((1 + rank, 1), rank, "float32")
    told["sum"] = numbers(hvd.allreduce(float(rank + 1), op=hvd.Sum, process_set=even))
    told["rows"] = numbers(hvd.allgather(own, process_set=even))
    told["given"] = numbers(hvd.broadcast(own[:1], root_rank=2, process_set=even))
    told["objects"] = hvd.allgather_object(rank, process_set=even)
    told["no root"] = refusal(lambda: hvd.broadcast(1.0, root_rank=1, process_set=even))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=even), "mse")
    model.fit(np.full((4, 2), 1.0 + rank), np.zeros((4, 1)), batch_size=4, verbose=0)
    told["weights"] = numbers(model.layers[0].kernel)
told["all"] = numbers(hvd.allreduce(float(rank), op=hvd.Sum))

# Rank 0 waits for rank 2 in their set, rank 2 for rank 0 among all.
told["crossed"] = refusal(
    lambda: hvd.barrier(process_set=even) if rank == 0 else hvd.allreduce(1.0)
)
hvd.shutdown()
print(json.dumps(told))
