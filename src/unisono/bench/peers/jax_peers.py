"""Data parallelism on JAX: Keras' own, and a `shard_map` loop without Keras."""

import json
import os
from typing import Any

from unisono.bench.nets import PER_REPLICA, data, make
from unisono.bench.peers.bare_nets import LEARNING_RATE, MOMENTUM, NORM_MOMENTUM, Layers, logits
from unisono.bench.racer import Pass, fit_pass, loop_pass
from unisono.launch.network import split_address


def data_parallel(net: str, num_steps: int, num_replicas: int) -> Pass:
    """keras.distribution.DataParallel, on virtual CPU devices where there are no GPUs."""
    import jax
    import keras

    if jax.default_backend() == "cpu" and jax.device_count() < num_replicas:
        raise RuntimeError("XLA_FLAGS must ask for virtual devices before JAX starts.")
    devices = keras.distribution.list_devices()[:num_replicas]
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    model = make(net)
    batch = PER_REPLICA[net] * num_replicas
    return fit_pass(model, net, batch * num_steps, batch)


def shard_map(net: str, num_steps: int, num_replicas: int) -> Pass:
    """One process per replica, one all-reduce of all gradients, over one fixed batch."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from unisono.backends.jax.internals import gloo_collectives, register_cpu_backend

    coordinator = json.loads(os.environ["BENCH_ADDRESSES"])[0]
    # JAX would listen on all addresses, and gloo at the one that the host's name leads to.
    jax.distributed.initialize(
        coordinator,
        num_replicas,
        int(os.environ["BENCH_RANK"]),
        coordinator_bind_address=coordinator,
    )
    register_cpu_backend(lambda: gloo_collectives(split_address(coordinator)[0]))
    mesh = jax.make_mesh((num_replicas,), ("batch",))
    replicated = NamedSharding(mesh, PartitionSpec())
    sharded = NamedSharding(mesh, PartitionSpec("batch"))

    x, y = data(net, PER_REPLICA[net])
    layers = bare_layers()()
    logits(net, layers, x)
    zeros = [np.zeros_like(each) for each in layers.params]
    moving = [np.zeros_like(each) for each in layers.statistics]
    start = ([np.asarray(each) for each in layers.params], zeros, moving, np.uint32(0))
    state = jax.tree.map(lambda each: _put(each, replicated), start)
    x, y = (jax.make_array_from_process_local_data(sharded, each) for each in (x, y))

    specs = (PartitionSpec(), PartitionSpec("batch"), PartitionSpec("batch"))
    step = jax.jit(
        jax.shard_map(
            lambda state, x, y: _step(net, state, x, y),
            mesh=mesh,
            in_specs=specs,
            out_specs=PartitionSpec(),
            check_vma=False,  # The gradients are reduced by hand.
        ),
        donate_argnums=0,
    )

    def one_step() -> Any:
        nonlocal state
        state, loss = step(state, x, y)
        return loss

    return loop_pass(one_step, num_steps)


def _step(net: str, state: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """SGD with momentum on a local batch."""
    import jax
    from jax.flatten_util import ravel_pytree

    params, velocities, moving, count = state
    key = jax.random.fold_in(jax.random.key(count), jax.lax.axis_index("batch"))

    def loss_of(params: Any) -> Any:
        return bare_loss(net, params, x, y, key)

    (loss, statistics), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    flat, unravel = ravel_pytree((grads, statistics, loss))
    grads, statistics, loss = unravel(jax.lax.pmean(flat, "batch"))
    velocities = [MOMENTUM * v - LEARNING_RATE * g for v, g in zip(velocities, grads, strict=True)]
    params = [p + v for p, v in zip(params, velocities, strict=True)]
    moving = [
        NORM_MOMENTUM * old + (1 - NORM_MOMENTUM) * new
        for old, new in zip(moving, statistics, strict=True)
    ]
    return (params, velocities, moving, count + 1), loss


def bare_loss(net: str, params: Any, x: Any, y: Any, key: Any = None) -> tuple[Any, Any]:
    """The mean loss of a batch, and the statistics of its batch norms."""
    import jax
    import jax.numpy as jnp

    layers = bare_layers()(params, key)
    log_probabilities = jax.nn.log_softmax(logits(net, layers, x))
    picked = jnp.take_along_axis(log_probabilities, y[:, None], axis=1)
    return -picked.mean(), layers.statistics


def bare_layers() -> type[Layers]:
    import jax
    import jax.numpy as jnp

    class JaxLayers(Layers):
        def variable(self, value: Any) -> Any:
            return jnp.asarray(value)

        def convolve(self, x: Any, kernel: Any, strides: int, padding: str) -> Any:
            layout = ("NHWC", "HWIO", "NHWC")
            return jax.lax.conv_general_dilated(
                x, kernel, (strides, strides), padding, dimension_numbers=layout
            )

        def moments(self, x: Any) -> tuple[Any, Any]:
            mean = x.mean((0, 1, 2))
            return mean, (x * x).mean((0, 1, 2)) - mean * mean

        def relu(self, x: Any) -> Any:
            return jax.nn.relu(x)

        def max_pool(self, x: Any, size: int, strides: int) -> Any:
            window, steps = (1, size, size, 1), (1, strides, strides, 1)
            return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, steps, "VALID")

        def mean_of_pixels(self, x: Any) -> Any:
            return x.mean((1, 2))

        def concatenate(self, parts: list[Any]) -> Any:
            return jnp.concatenate(parts, -1)

        def flatten(self, x: Any) -> Any:
            return x.reshape(len(x), -1)

        def dropout(self, x: Any) -> Any:
            if self.dropout_key is None:
                return x
            return jnp.where(jax.random.bernoulli(self.dropout_key, 0.5, x.shape), 2 * x, 0.0)

    return JaxLayers


def _put(value: Any, sharding: Any) -> Any:
    import jax
    import numpy as np

    return jax.make_array_from_process_local_data(sharding, np.asarray(value))
