"""`run`: a function in several processes of this machine, started from Python."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono.spawn import spawn

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
    """Run `func(*args, **kwargs)` in `num_proc` processes of this machine; what each returned.

    Each calls `init` itself. Programs on many hosts are started with `unisono run`, and Horovod's
    options for that are refused or, where nothing depends on them, passed over.

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
