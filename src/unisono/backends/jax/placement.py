"""JAX: ops of a scope, and the devices of an array.

`jax.default_device` leaves arrays uncommitted, so values of several scopes can meet in one op,
which then runs on the device of the scope that it is in. Committed arrays would refuse to.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import keras

from unisono.backends.jax.devices import devices_of, ensure_cpu_devices
from unisono.backends.jax.framework import has_started
from unisono.devices import Placement
from unisono.devices.locations import Location, location, name_of
from unisono.errors import StartedError
from unisono.reserve import num_reserved

CANNOT_LOG = "jax runs compiled programs and does not tell where each op ran"


@contextmanager
def device_scope(placement: Placement) -> Iterator[None]:
    if placement.kind == "cpu":
        _prepare(placement.indices[0])
    with jax.default_device(devices_of(placement)[0]):
        yield


def locate(value: Any) -> Location | None:
    if isinstance(value, keras.Variable):
        value = value._value
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return None
    if value.is_deleted():
        return None  # Given away to a compiled step.
    shards = sorted(value.addressable_shards, key=lambda shard: int(shard.device.id))
    on = {_name(shard.device): int(shard.data.nbytes) for shard in shards}
    is_replicated = value.sharding.is_fully_replicated
    layout = "single" if len(on) == 1 else "replicated" if is_replicated else "sharded"
    return location(value.shape, int(value.nbytes), on, layout=layout)


def _prepare(index: int) -> None:
    """Have this CPU device; all that may be asked for at once, as each restart costs."""
    if index == 0 or (has_started() and len(jax.local_devices(backend="cpu")) > index):
        return
    try:
        ensure_cpu_devices(max(num_reserved(), index + 1))
    except StartedError:
        ensure_cpu_devices(index + 1)  # Fixed by the program, perhaps at enough.


def _name(device: Any) -> str:
    kind = "cpu" if device.platform == "cpu" else "gpu"
    # Asked of its own client: an array may have been made before the backend was restarted.
    return name_of(kind, device.client.local_devices().index(device))
