"""JAX as a backend: the replicas are devices of one mesh, and the compiler partitions the step."""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import keras

from unisono.backends.jax.collectives import JaxCollectives
from unisono.backends.jax.custom_loop import JaxLoop
from unisono.backends.jax.devices import devices_of, ensure_cpu_devices
from unisono.backends.jax.internals import has_started
from unisono.backends.jax.mesh import process_mesh
from unisono.backends.jax.trainer import JaxTrainer
from unisono.devices import Placement
from unisono.devices.locations import Location, location, name_of
from unisono.errors import StartedError
from unisono.reserve import num_reserved


class JaxBackend:
    """See base.Backend."""

    def num_gpus(self) -> int:
        return 0 if jax.default_backend() == "cpu" else jax.local_device_count()

    def prepare(self, placement: Placement) -> None:
        if placement.kind == "gpu" and placement.num_replicas > 1:
            _warn_of_tensorflow()
        if placement.kind == "cpu" and placement.num_processes == 1:
            ensure_cpu_devices(max(placement.indices) + 1)

    def replicate(
        self, model: keras.Model, placement: Placement, *, sync_batch_norm: bool
    ) -> JaxTrainer:
        return JaxTrainer(model, placement, sync_batch_norm=sync_batch_norm)

    def custom_loop(self, placement: Placement) -> JaxLoop:
        return JaxLoop(placement)

    def collectives(self, ranks: Sequence[int] | None = None) -> JaxCollectives:
        return JaxCollectives(process_mesh(ranks=ranks))

    @contextmanager
    def device_scope(self, placement: Placement) -> Iterator[None]:
        # A default leaves arrays uncommitted, so that values of several scopes can be used in one
        # op, which runs on the device of the scope that it is in. Committed arrays would raise.
        if placement.kind == "cpu":
            _prepare_cpu_device(placement.indices[0])
        with jax.default_device(devices_of(placement)[0]):
            yield

    def locate(self, values: Sequence[Any]) -> list[Location | None]:
        return [_locate(value) for value in values]

    def log_placement(self, is_on: bool) -> str | None:
        return "jax runs compiled programs and does not report where each op ran"


_has_warned = False


def _warn_of_tensorflow() -> None:
    """TensorFlow may bring a second NCCL into the process, and JAX' communicators then fail."""
    global _has_warned
    if "tensorflow" not in sys.modules or _has_warned:
        return
    _has_warned = True
    warnings.warn(
        "TensorFlow is imported beside JAX, on several GPUs: with its own NCCL in the process, "
        'JAX\'s collectives can fail with "corrupted comm object detected" (jax#39167). Do not '
        "import it in this program, or replace it: pip uninstall tensorflow; "
        "pip install tensorflow-cpu",
        stacklevel=5,
    )


def _prepare_cpu_device(index: int) -> None:
    """Have this CPU device, and all reserved ones at once, since each restart costs."""
    if index == 0 or (has_started() and len(jax.local_devices(backend="cpu")) > index):
        return
    try:
        ensure_cpu_devices(max(num_reserved(), index + 1))
    except StartedError:
        ensure_cpu_devices(index + 1)  # Fixed by the program, perhaps at enough.


def _locate(value: Any) -> Location | None:
    if isinstance(value, keras.Variable):
        value = value._value
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return None
    if value.is_deleted():
        return None  # Donated to a compiled step.
    shards = sorted(value.addressable_shards, key=lambda shard: int(shard.device.id))
    on = {_name(shard.device): int(shard.data.nbytes) for shard in shards}
    is_replicated = value.sharding.is_fully_replicated
    layout = "single" if len(on) == 1 else "replicated" if is_replicated else "sharded"
    return location(value.shape, int(value.nbytes), on, layout=layout)


def _name(device: Any) -> str:
    kind = "cpu" if device.platform == "cpu" else "gpu"
    # Among its own client's: an array may have been made before the backend was restarted.
    return name_of(kind, device.client.local_devices().index(device))
