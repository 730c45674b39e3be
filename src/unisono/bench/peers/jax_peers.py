"""Keras' own data parallelism on JAX."""

from collections.abc import Callable
from typing import Any

from unisono.bench.nets import PER_REPLICA, data, make


def data_parallel(net: str, num_steps: int, num_replicas: int) -> Callable[[], Any]:
    """keras.distribution.DataParallel, on virtual CPU devices where there are no GPUs."""
    import jax
    import keras

    if jax.default_backend() == "cpu" and jax.device_count() < num_replicas:
        raise RuntimeError("XLA_FLAGS must ask for virtual devices before JAX starts.")
    devices = keras.distribution.list_devices()[:num_replicas]
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    model = make(net)
    batch = PER_REPLICA[net] * num_replicas
    x, y = data(net, batch * num_steps)
    return lambda: model.fit(x, y, batch_size=batch, verbose=0) and None
