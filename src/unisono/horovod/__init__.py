"""Horovod's interface for Keras, on JAX, TensorFlow and torch: `import unisono.horovod as hvd`.

A program written for Horovod runs with its import changed. Each process trains on its own batches,
and gradients are averaged over the processes; start them with `unisono run`. In new programs
`unisono.parallel` is simpler, and gives the result of one device.
"""

from unisono.horovod import callbacks, elastic
from unisono.horovod.collectives import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
)
from unisono.horovod.models import load_model
from unisono.horovod.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from unisono.horovod.processes import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    run,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from unisono.horovod.reductions import Adasum, Average, Compression, Max, Min, Product, Sum
from unisono.horovod.session import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from unisono.horovod.session import seed_processes as _seed_processes
from unisono.horovod.variables import (
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
)

_seed_processes()

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
