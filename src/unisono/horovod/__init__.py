"""Horovod's interface for Keras, on JAX, TensorFlow and torch: `import unisono.horovod as hvd`.

A program written for Horovod runs with its import changed. Each process trains on batches of its
own, and gradients are averaged between them; start several with `unisono run`. In new programs
`unisono.parallel` is simpler, and gives the result of one device.
"""

from unisono.horovod import callbacks, elastic
from unisono.horovod.builds import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
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
from unisono.horovod.compression import Compression
from unisono.horovod.loading import load_model
from unisono.horovod.objects import allgather_object, broadcast_object
from unisono.horovod.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from unisono.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from unisono.horovod.processes import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from unisono.horovod.reductions import Adasum, Average, Max, Min, Product, Sum
from unisono.horovod.running import run
from unisono.horovod.seeds import seed_processes as _seed_processes
from unisono.horovod.variables import (
    broadcast_,
    broadcast_global_variables,
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
