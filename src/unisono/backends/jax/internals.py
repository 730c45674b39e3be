"""Every private name of JAX that this package uses, each in a function that says what for.

tests/backend/test_keras_names.py checks each of them against the installed release. JAX is imported
inside the functions: some of them run in processes that have not imported it.
"""

import atexit
from collections.abc import Callable
from typing import Any

# JAX's heartbeats abort processes that are late. Here the launcher decides who is late or lost.
_NO_HEARTBEATS_S = 7 * 24 * 3600


def has_started() -> bool:
    """Whether JAX has started its devices."""
    # jax.config.update answers this only by raising.
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def uncommitted(value: Any) -> Any:
    """The same array of one device, free to move to the devices of other arguments of a call."""
    import jax
    from jax._src.array import ArrayImpl

    if not isinstance(value, jax.Array) or not value.committed:
        return value
    return ArrayImpl(value.aval, value.sharding, [value], committed=False)


def start_coordination_service(address: str, num_processes: int) -> Any:
    """JAX's coordination service in this process; its `shutdown()` ends it."""
    from jaxlib import _jax  # Without jax, whose import would take a second.

    return _jax.get_distributed_runtime_service(
        address, num_processes, heartbeat_timeout=_NO_HEARTBEATS_S, shutdown_timeout=1
    )


def connect_to_service(address: str, *, rank: int, num_processes: int, timeout_s: int) -> None:
    """Join a run, as `jax.distributed.initialize` does, but never wait for others at exit."""
    from jax._src import distributed
    from jax._src.lib import _jax

    state = distributed.global_state
    client = _jax.get_distributed_runtime_client(
        address,
        rank,
        init_timeout=timeout_s,
        heartbeat_timeout=_NO_HEARTBEATS_S,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    state.client = client
    state.process_id = rank
    state.num_processes = num_processes
    state.coordinator_address = address
    # JAX's own hook at exit waits for all other processes, also when this one has failed.
    atexit.register(setattr, state, "client", None)


def register_cpu_backend(make_collectives: Callable[[], Any]) -> None:
    """Have CPU devices, once they start, communicate through what `make_collectives` returns."""
    from jax._src import xla_bridge

    def make_client() -> Any:
        return xla_bridge.make_cpu_client(make_collectives())

    xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def gloo_collectives(host: str) -> Any:
    """gloo between the processes of the run, listening on one address and not on the host name."""
    from jax._src import distributed
    from jax._src.lib import _jax

    return _jax.make_gloo_tcp_collectives(distributed.global_state.client, hostname=host)
