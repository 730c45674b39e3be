"""A100s that only compile: a topology of JAX's CUDA plugin in the place of devices.

The public path runs as on a machine with GPUs, up to the first call of a compiled step: an array
that is put on these devices stays on the CPU and is remembered with its sharding, and a jitted
function that is called with one is lowered for them and raises `Lowered`. JAX's own functions are
replaced and nothing else, so that what is compiled is what `fit` would run. Import this before
Keras.
"""

import os
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# There is no device to time kernels on.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

A100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 167936 threads_per_core_limit: 2048 core_count: 108 fpus_per_core: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 1555200000000 l2_cache_size: 41943040 clock_rate_ghz: 1.41
  device_memory_size: 42331013120 shared_memory_per_block_optin: 166912
  cuda_compute_capability { major: 8 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 3 patch: 0 }
runtime_version { major: 12 minor: 6 patch: 0 }
device_description_str: "sm_8.0 with 42331013120B RAM, 108 cores, 1410000KHz clock, 1215000KHz mem clock, 41943040B L2$"
"""  # noqa: E501


class Lowered(Exception):
    """A step is about to be compiled and called, which is as far as it goes without a device."""

    def __init__(self, step: Any) -> None:
        super().__init__("lowered")
        self.step = step


_plain_jit, _plain_put = jax.jit, jax.device_put


def install(num_gpus: int, *, is_plain: bool = False) -> list[Any]:
    """Have JAX, as programs see it, own so many A100s of one host; returns them.

    Args:
        num_gpus: How many.
        is_plain: Compile for all of them what plain Keras puts on the CPU, as
            `keras.distribution.DataParallel` does: state replicated, batches split by rows.
    """
    described = topologies.get_topology_desc(
        platform="cuda", topology_name="a100", target_config=A100, topology=f"1 x 1 x {num_gpus}"
    )
    devices = list(described.devices)
    jax.default_backend = lambda: "gpu"
    _install_rnn_sizes()
    if is_plain:
        _install_plain(devices)
    else:
        _install_public(devices)
    return devices


def _install_public(devices: list[Any]) -> None:
    plain_devices = jax.local_devices

    def local_devices(*args: Any, backend: str | None = None, **kwargs: Any) -> list[Any]:
        return plain_devices(*args, backend=backend, **kwargs) if backend == "cpu" else devices

    def device_put(value: Any, device: Any = None, **kwargs: Any) -> Any:
        if not (isinstance(device, Sharding) and device.device_set <= set(devices)):
            return _plain_put(value, device, **kwargs)
        return jax.tree.map(lambda leaf: placed.put(leaf, device), value)

    placed = _Placed()
    jax.local_devices, jax.device_put = local_devices, device_put
    jax.local_device_count = lambda *_: len(devices)
    jax.jit = _recording_jit(placed.shapes_of)


def _install_plain(devices: list[Any]) -> None:
    mesh = Mesh(np.array(devices), ("batch",))
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("batch"))

    def as_shapes(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if len(args) != 2 or not isinstance(args[0], tuple) or len(args[0]) != 4:
            return None  # Not a train step.
        state, data = args
        put = lambda value, where: jax.tree.map(lambda leaf: _shape(leaf, where), value)  # noqa: E731
        return put(state, whole), put(data, split)

    jax.jit = _recording_jit(as_shapes, out_shardings=(None, whole))


def _install_rnn_sizes() -> None:
    """Sizes of cuDNN's buffers, which JAX asks the device for; about those of an LSTM."""
    from jax.experimental import rnn
    from jaxlib import gpu_rnn

    def sizes(
        input_size: int, hidden_size: int, num_layers: int, batch_size: int, length: int, *_: Any
    ) -> tuple[int, int]:
        gates = 4 * num_layers * batch_size * length * hidden_size
        return gates, 2 * gates

    gpu_rnn.compute_rnn_workspace_reserve_space_sizes = sizes
    assert rnn.gpu_rnn is gpu_rnn


def _recording_jit(
    shapes_of: Callable[[tuple[Any, ...]], tuple[Any, ...] | None], **more: Any
) -> Callable[..., Any]:
    def jit(function: Any = None, **options: Any) -> Any:
        if function is None:
            return lambda found: jit(found, **options)
        compiled = _plain_jit(function, **options)

        def call(*args: Any, **kwargs: Any) -> Any:
            shapes = shapes_of(args)
            if shapes is None:
                return compiled(*args, **kwargs)
            again = _plain_jit(function, **{**options, **more}) if more else compiled
            raise Lowered(again.lower(*shapes))

        call.lower = compiled.lower
        call.__wrapped__ = function
        return call

    return jit


class _Placed:
    """The arrays that were put on the GPUs."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}

    def put(self, value: Any, sharding: Any) -> Any:
        copy = jax.numpy.array(value)
        self._known[id(copy)] = (copy, sharding)  # Kept, so that its id stays its own.
        return copy

    def shapes_of(self, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The arguments of a call as shapes on the GPUs; None if they are elsewhere."""
        leaves, structure = jax.tree.flatten(args)
        if not any(id(leaf) in self._known for leaf in leaves):
            return None
        shapes = [_shape(leaf, self._known[id(leaf)][1]) for leaf in leaves]
        found: tuple[Any, ...] = jax.tree.unflatten(structure, shapes)
        return found


def _shape(leaf: Any, sharding: Any) -> Any:
    dtype = jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=sharding)
