"""Initialize and shut down, ranks and sizes, starting processes, and what the backend supports."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono.errors import DisagreementError
from unisono.horovod import session as _session
from unisono.horovod import timeline
from unisono.horovod.frameworks import framework
from unisono.horovod.models import leave_compile, watch_compile
from unisono.horovod.session import ProcessSet, close_sets, open_sets
from unisono.spawn import spawn

_TIMELINE = "HOROVOD_TIMELINE"


def init(comm: Sequence[int] | None = None, process_sets: Any = None) -> None:
    """Initialize; every process of the run calls this first. A second call does nothing.

    The processes are those that `unisono run` started (or `unisono.spawn`, torchrun, mpirun,
    srun). A program that was started alone has size 1, and every collective returns its input.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.size()
    1
    """
    if _session.is_open():
        return
    given = _given_sets(process_sets)
    asked = [None if comm is None else list(comm), [each.ranks for each in given]]
    every = _session.open_session(asked)
    try:
        _check(asked, every)
        open_sets(given)
    except Exception:
        close_sets()
        _session.close_session()
        raise
    watch_compile()
    path = os.environ.get(_TIMELINE, "")
    if path and path.upper() != "DYNAMIC":
        timeline.start(path)


def shutdown() -> None:
    """Shut down; `init` may be called again.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.shutdown()
    >>> hvd.is_initialized()
    False
    """
    timeline.stop()
    close_sets()
    leave_compile()
    _session.close_session()


def is_initialized() -> bool:
    """Whether `init` was called, without a `shutdown` since.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.is_initialized()
    True
    """
    return _session.is_open()


def rank() -> int:
    """This process' rank among all, from 0.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.rank()
    0
    """
    return _session.session().rank


def local_rank() -> int:
    """This process' rank on its node.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.local_rank()
    0
    """
    return _session.session().local_rank


def cross_rank() -> int:
    """This process' rank among those with its local rank, one per node.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.cross_rank()
    0
    """
    return _session.session().cross_rank


def size() -> int:
    """The number of processes.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.size()
    1
    """
    return _session.session().size


def local_size() -> int:
    """The number of processes on this node.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.local_size()
    1
    """
    return _session.session().local_size


def cross_size() -> int:
    """The number of nodes that have a process with this local rank.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.cross_size()
    1
    """
    return _session.session().cross_size


def is_homogeneous() -> bool:
    """Whether all nodes have the same number of processes.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.is_homogeneous()
    True
    """
    return _session.session().is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write every collective from now on to a file for chrome://tracing or Perfetto.

    Rank 0 writes it for all ranks, with a row for each rank and tensor: the time that the rank
    waited for the others (`NEGOTIATE_ALLREDUCE`) and the collective itself (`ALLREDUCE`). The
    variable HOROVOD_TIMELINE does the same from `init` on. `mark_cycles` is accepted and ignored:
    there are no cycles.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.start_timeline("timeline.json")
    >>> hvd.stop_timeline()
    """
    _session.session()
    timeline.start(file_path)


def stop_timeline() -> None:
    """Close the file of `start_timeline`.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> hvd.stop_timeline()
    """
    _session.session()
    timeline.stop()


def _given_sets(process_sets: Any) -> list[ProcessSet]:
    if process_sets is None or process_sets == "dynamic":
        return []
    found = list(process_sets)
    for each in found:
        if not isinstance(each, ProcessSet):
            raise ValueError(
                f"Received process_sets with a {type(each).__name__}. Give a list of "
                "hvd.ProcessSet, or 'dynamic'."
            )
    return found


def _check(asked: list[Any], every: list[Any]) -> None:
    for number, other in enumerate(every):
        if other != every[0]:
            raise DisagreementError(
                f"Mismatched hvd.init(): rank 0 gave communicator and process sets {every[0]}, "
                f"rank {number} {other}. Every process must give the same."
            )
    ranks = asked[0]
    if ranks and sorted(ranks) != list(range(_session.session().size)):
        raise NotImplementedError(
            f"Asked for hvd.init(comm={ranks}), some ranks of {_session.session().size}. Call "
            "hvd.init() and give collectives a process_set=hvd.ProcessSet([...])."
        )


_HERE = ("localhost", "127.0.0.1", "::1")
_ELASTIC = ("min_num_proc", "max_num_proc", "slots", "reset_limit", "cooldown_range")
_UNNEEDED = (
    "start_timeout",
    "ssh_port",
    "ssh_identity_file",
    "disable_cache",
    "output_filename",
    "verbose",
    "use_gloo",
    "use_mpi",
    "mpi_args",
    "network_interface",
    "network_interfaces",
    "executable",
)


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    **options: Any,
) -> list[Any]:
    """Run `func(*args, **kwargs)` in `num_proc` processes of this machine; returns their results.

    Each process calls `init` itself. Start programs on many hosts with `unisono run`: Horovod's
    options for that raise an error, or are ignored where nothing depends on them.

    >>> run(print, num_proc=2, hosts="elsewhere:2")
    Traceback (most recent call last):
    ...
    ValueError: Asked to run on hosts 'elsewhere:2'...
    """
    if np is not None:
        warnings.warn("np is deprecated; write num_proc.", DeprecationWarning, stacklevel=2)
        num_proc = np
    _check_options(options, host_discovery_script)
    _check_hosts(hosts, hostfile)
    return spawn(func, args, kwargs, replicas=num_proc)


def _check_options(options: Mapping[str, Any], host_discovery_script: str | None) -> None:
    unknown = [name for name in options if name not in (*_ELASTIC, *_UNNEEDED)]
    if unknown:
        raise TypeError(f"run() got an unexpected keyword argument {unknown[0]!r}")
    elastic = [name for name in _ELASTIC if options.get(name) is not None]
    if elastic or host_discovery_script is not None:
        name = (elastic or ["host_discovery_script"])[0]
        raise NotImplementedError(f"Received {name}: elastic runs are not implemented yet.")
    if options.get("use_gloo") and options.get("use_mpi"):
        raise ValueError("Received use_gloo and use_mpi. Give neither: the backend's own is used.")


def _check_hosts(hosts: str | None, hostfile: str | None) -> None:
    names = [entry.rpartition(":")[0] or entry for entry in (hosts or "").split(",") if entry]
    if hostfile is not None or any(name.strip("[]") not in _HERE for name in names):
        raise ValueError(
            f"Asked to run on hosts {hosts or hostfile!r}. hvd.run starts processes on this "
            "machine; start a program on many hosts with "
            "`unisono run --nodes K --node-rank R --coordinator host:port script.py` on each."
        )


def mpi_built() -> bool:
    """Whether MPI transfers tensors; it never does here.

    >>> mpi_built()
    False
    """
    return False


def mpi_enabled() -> bool:
    """Whether MPI transfers tensors; it never does, not even under mpirun.

    >>> mpi_enabled()
    False
    """
    return False


def mpi_threads_supported() -> bool:
    """Raises ValueError, as Horovod does without MPI.

    >>> mpi_threads_supported()
    Traceback (most recent call last):
    ...
    ValueError: MPI is not enabled: the backend's collectives transfer tensors...
    """
    raise ValueError(
        "MPI is not enabled: the backend's collectives transfer tensors (gloo, gRPC or NCCL). "
        "Check hvd.mpi_enabled() first."
    )


def gloo_built() -> bool:
    """Whether gloo transfers tensors between CPUs: on JAX and torch; TensorFlow uses gRPC.

    >>> gloo_built() in (True, False)
    True
    """
    return framework().has_gloo


def gloo_enabled() -> bool:
    """Whether gloo transfers tensors between CPUs.

    >>> gloo_enabled() == gloo_built()
    True
    """
    return gloo_built()


def nccl_built() -> int:
    """NCCL's version as one number, or 0 without it.

    The version is known only on torch; it is 1 if JAX or TensorFlow was built for CUDA.

    >>> nccl_built() >= 0
    True
    """
    return framework().nccl_version()


def ddl_built() -> bool:
    """Whether IBM's DDL transfers tensors; it never does here.

    >>> ddl_built()
    False
    """
    return False


def ccl_built() -> bool:
    """Whether Intel's oneCCL transfers tensors; it never does here.

    >>> ccl_built()
    False
    """
    return False


def cuda_built() -> bool:
    """Whether the backend was built for CUDA.

    >>> cuda_built() in (True, False)
    True
    """
    return framework().is_cuda_built()


def rocm_built() -> bool:
    """Whether the backend was built for ROCm.

    >>> rocm_built() in (True, False)
    True
    """
    return framework().is_rocm_built()
