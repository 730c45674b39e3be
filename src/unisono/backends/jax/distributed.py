"""Join a run of several processes on JAX: every process one device of the global mesh.

Done by hand and not by `jax.distributed.initialize`, which has no place for what a run needs: a
service that outlives any process (jax_service.py), collectives on the CPU that listen where the
others reach this process, and an end that waits for nobody. A SIGTERM stays what it is.
"""

import atexit
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from typing import Any

import jax

from unisono.backends.jax.coordination_service import NO_HEARTBEATS_S, address, hold_line
from unisono.backends.jax.framework import has_started
from unisono.devices import num_gpus, simulated_gpus
from unisono.devices.gloo_threads import patient_threads
from unisono.errors import LaunchError, StartedError
from unisono.launch.client import World
from unisono.launch.source_filter import OnlyFrom, source_addresses

_KEY = "jax/service"
_START_TIMEOUT_S = 300
# Devices start when a program first computes, which one process may do much later than another.
_FIRST_USE_MINUTES = 24 * 60


def join(world: World) -> None:
    """Make this process' devices part of the run's; it has to be done before JAX starts them."""
    if has_started():
        raise StartedError(
            f"Rank {world.rank} joins a run of {world.size} processes, but JAX has started its "
            "devices. Import unisono before building a model or making an array."
        )
    sources = source_addresses(world, world.all_gather("addresses of JAX", world.host))
    if world.is_chief:
        world.put(_KEY, _start_service(world, sources).encode())
    host, port, port_of_lines, token = world.get(_KEY).decode().split()
    try:
        hold_line(host, int(port_of_lines), token, _START_TIMEOUT_S)
        _connect(world, address(host, int(port)))
    except (OSError, RuntimeError) as error:
        raise LaunchError(
            f"Rank {world.rank} got no answer from JAX's service at {host}, ports {port} and "
            f"{port_of_lines}: {error}. Check that no firewall stands between the nodes."
        ) from error
    _register_cpu_backend(world, sources)
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
        with contextlib.suppress(BrokenPipeError):  # What it said is told below.
            process.stdin.write(f"{token}\n".encode())
            process.stdin.flush()
        ports = process.stdout.readline().decode().split()
        if len(ports) != 2:
            errors.seek(0)
            said = errors.read()[-4000:].decode(errors="replace")
            raise LaunchError(
                f"JAX's service for the run could not be started on {world.host}. Check that this "
                f"is an address of this machine. It said:\n{said}"
            )
    os.dup(process.stdin.fileno())  # Left to the system likewise.
    return " ".join([world.host, *ports, token])


def _connect(world: World, service: str) -> None:
    from jax._src import distributed
    from jax._src.lib import _jax

    state = distributed.global_state
    client = _jax.get_distributed_runtime_client(
        service,
        world.rank,
        init_timeout=_START_TIMEOUT_S,
        heartbeat_timeout=NO_HEARTBEATS_S,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    state.client = client
    state.process_id = world.rank
    state.num_processes = world.size
    state.coordinator_address = service
    # JAX's own end would wait for all other processes, also when this one has failed.
    atexit.register(setattr, state, "client", None)


def _register_cpu_backend(world: World, sources: set[str]) -> None:
    """Let the collectives of CPU devices listen on one address, and not on the host's name."""
    from jax._src import distributed, xla_bridge
    from jax._src.lib import _jax

    def make_client() -> Any:
        with patient_threads(), OnlyFrom(sources, host=world.host):
            client = distributed.global_state.client
            gloo = _jax.make_gloo_tcp_collectives(client, hostname=world.host)
        return xla_bridge.make_cpu_client(gloo)

    jax.config.update("jax_cpu_get_local_topology_timeout_minutes", _FIRST_USE_MINUTES)
    jax.config.update("jax_cpu_get_global_topology_timeout_minutes", _FIRST_USE_MINUTES + 1)
    xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def _take_own_gpu(world: World) -> None:
    """Leave a process one GPU where its launcher has shown it several."""
    visible = 0 if simulated_gpus() else num_gpus()
    if visible > 1:
        own = str(world.topology.local_rank % visible)
        jax.config.update("jax_cuda_visible_devices", own)
