"""Join a run of several processes on JAX: each process has one device of the global mesh.

Not by `jax.distributed.initialize`, which cannot do what a run needs: a service that outlives any
process (coordination_service.py), collectives of CPU devices that listen on the address at which
the others reach this process, and an exit that does not wait for others. SIGTERM keeps its meaning.
"""

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from typing import Any

import jax

from unisono.backends.gloo_threads import placed_apart
from unisono.backends.jax.coordination_service import hold_connection
from unisono.backends.jax.internals import (
    connect_to_service,
    gloo_collectives,
    has_started,
    register_cpu_backend,
)
from unisono.devices import num_gpus, simulated_gpus
from unisono.errors import LaunchError, StartedError
from unisono.launch.client import World
from unisono.launch.network import join_address
from unisono.launch.source_filter import OnlyFrom, source_addresses

_KEY = "jax/service"
_START_TIMEOUT_S = 300
# Devices start when a program first computes, which one process may do much later than another.
_FIRST_USE_MINUTES = 24 * 60


def join(world: World) -> None:
    """Make this process' devices part of the run's, before JAX starts them.

    Raises:
        StartedError: JAX has started its devices.
        LaunchError: The coordination service could not be started or reached.
    """
    if has_started():
        raise StartedError(
            f"Rank {world.rank} joins a run of {world.size} processes, but JAX has started its "
            "devices. Import unisono before building a model or making an array."
        )
    sources = source_addresses(world, world.all_gather("addresses of JAX", world.host))
    if world.is_chief:
        world.put(_KEY, _start_service(world, sources).encode())
    host, port, connections_port, token = world.get(_KEY).decode().split()
    try:
        hold_connection(host, int(connections_port), token, _START_TIMEOUT_S)
        address = join_address(host, int(port))
        connect_to_service(
            address, rank=world.rank, num_processes=world.size, timeout_s=_START_TIMEOUT_S
        )
    except (OSError, EOFError, RuntimeError, LaunchError) as error:
        raise LaunchError(
            f"Rank {world.rank} got no answer from JAX's coordination service at {host}, ports "
            f"{port} and {connections_port}: {error}. Check that no firewall is between the nodes."
        ) from error
    _set_up_cpu_collectives(world, sources)
    _take_own_gpu(world)


def _start_service(world: World, sources: set[str]) -> str:
    """`host port port token` of a service process for the run."""
    token = secrets.token_hex(32)
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    words = [sys.executable, "-P", "-m", "unisono.backends.jax.coordination_service"]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*words, world.host, str(world.size), *sorted(sources)],
            env={**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Not this process' own: a launcher that reads from it would wait for the service.
            stderr=errors,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # Its error output is reported below.
            process.stdin.write(f"{token}\n".encode())
            process.stdin.flush()
        ports = process.stdout.readline().decode().split()
        if len(ports) != 2:
            errors.seek(0)
            output = errors.read()[-4000:].decode(errors="replace")
            raise LaunchError(
                f"JAX's coordination service could not be started on {world.host}. Check that this "
                f"is an address of this machine. It printed:\n{output}"
            )
    os.dup(process.stdin.fileno())  # Left for the system to close, when this process has ended.
    return " ".join([world.host, *ports, token])


def _set_up_cpu_collectives(world: World, sources: set[str]) -> None:
    def make_collectives() -> Any:
        with OnlyFrom(sources, host=world.host), placed_apart():
            return gloo_collectives(world.host)

    jax.config.update("jax_cpu_get_local_topology_timeout_minutes", _FIRST_USE_MINUTES)
    jax.config.update("jax_cpu_get_global_topology_timeout_minutes", _FIRST_USE_MINUTES + 1)
    register_cpu_backend(make_collectives)


def _take_own_gpu(world: World) -> None:
    """Leave a process one GPU if its launcher has shown it several."""
    visible = 0 if simulated_gpus() else num_gpus()
    if visible > 1:
        own = str(world.topology.local_rank % visible)
        jax.config.update("jax_cuda_visible_devices", own)
