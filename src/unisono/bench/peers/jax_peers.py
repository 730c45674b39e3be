"""Keras' own data parallelism on JAX."""

from unisono.bench.nets import PER_REPLICA, make
from unisono.bench.passes import Pass, fit_pass


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
