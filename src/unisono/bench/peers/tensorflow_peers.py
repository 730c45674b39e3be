"""TensorFlow's strategies, with Keras and without."""

import json
import os
from typing import Any

from unisono.bench.nets import PER_REPLICA, data, make
from unisono.bench.peers.bare_nets import LEARNING_RATE, MOMENTUM, NORM_MOMENTUM, Layers, logits
from unisono.bench.racer import Pass, fit_pass, loop_pass
from unisono.launch.network import split_address


def mirrored(net: str, num_steps: int, num_replicas: int) -> Pass:
    """MirroredStrategy with `fit`, on all GPUs or on virtual CPU devices."""
    import tensorflow as tf

    names = [f"GPU:{i}" for i in range(len(tf.config.list_physical_devices("GPU")))]
    if not names:
        cpus = tf.config.list_physical_devices("CPU")
        parts = [tf.config.LogicalDeviceConfiguration()] * num_replicas
        if len(tf.config.list_logical_devices("CPU")) < num_replicas:
            tf.config.set_logical_device_configuration(cpus[0], parts)
        names = [f"CPU:{i}" for i in range(num_replicas)]
    with tf.distribute.MirroredStrategy(names[:num_replicas]).scope():
        model = make(net)
    batch = PER_REPLICA[net] * num_replicas
    return fit_pass(model, net, batch * num_steps, batch)


def multi_worker(net: str, num_steps: int, num_replicas: int) -> Pass:
    """A Keras model in a custom loop over one fixed batch, as its `fit` is broken in Keras 3."""
    import keras
    import tensorflow as tf

    strategy = _multi_worker_strategy()
    with strategy.scope():
        model = make(net)
        optimizer = keras.optimizers.SGD(5e-3, momentum=0.9)
        optimizer.build(model.trainable_variables)
    x, y = data(net, PER_REPLICA[net])
    loss_of = keras.losses.get(model.loss)
    x, y = tf.constant(x), tf.constant(y)

    @tf.function
    def step() -> Any:
        def on_replica(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(loss_of(y, model(x, training=True))) / num_replicas
            variables = model.trainable_variables
            gradients = tape.gradient(loss, variables)
            context = tf.distribute.get_replica_context()
            gradients = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
            optimizer.apply(gradients, variables)
            return loss

        return strategy.run(on_replica, args=(x, y))

    return loop_pass(step, num_steps)


def bare_multi_worker(net: str, num_steps: int, num_replicas: int) -> Pass:
    """MultiWorkerMirroredStrategy and TensorFlow's ops without Keras, over one fixed batch."""
    import tensorflow as tf

    strategy = _multi_worker_strategy()
    x, y = (tf.constant(each) for each in data(net, PER_REPLICA[net]))
    with strategy.scope():
        layers = bare_layers()()
        logits(net, layers, x)
        params = layers.params
        velocities = [tf.Variable(tf.zeros_like(each), trainable=False) for each in params]
        moving = [tf.Variable(tf.zeros_like(each), trainable=False) for each in layers.statistics]

    def on_replica(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss, statistics = bare_loss(net, params, x, y, dropout_key=True)
        values = [*tape.gradient(loss, params), *statistics, loss]
        context = tf.distribute.get_replica_context()
        values = context.all_reduce(tf.distribute.ReduceOp.MEAN, values)
        grads, statistics = values[: len(params)], values[len(params) : -1]
        for param, velocity, grad in zip(params, velocities, grads, strict=True):
            new = MOMENTUM * velocity - LEARNING_RATE * grad
            velocity.assign(new)
            param.assign_add(new)
        for average, value in zip(moving, statistics, strict=True):
            average.assign(NORM_MOMENTUM * average + (1 - NORM_MOMENTUM) * value)
        return values[-1]

    @tf.function
    def step() -> Any:
        return strategy.run(on_replica, args=(x, y))

    return loop_pass(step, num_steps)


def bare_loss(
    net: str, params: Any, x: Any, y: Any, dropout_key: Any = None
) -> tuple[Any, list[Any]]:
    """The mean loss of a batch, and the statistics of its batch norms."""
    import tensorflow as tf

    layers = bare_layers()(params, dropout_key)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits(net, layers, x))
    return tf.reduce_mean(losses), layers.statistics


def bare_layers() -> type[Layers]:
    import tensorflow as tf

    class TensorFlowLayers(Layers):
        def variable(self, value: Any) -> Any:
            return tf.Variable(value)

        def convolve(self, x: Any, kernel: Any, strides: int, padding: str) -> Any:
            return tf.nn.conv2d(x, kernel, strides, padding)

        def moments(self, x: Any) -> tuple[Any, Any]:
            mean, variance = tf.nn.moments(x, [0, 1, 2])
            return mean, variance

        def relu(self, x: Any) -> Any:
            return tf.nn.relu(x)

        def max_pool(self, x: Any, size: int, strides: int) -> Any:
            return tf.nn.max_pool2d(x, size, strides, "VALID")

        def mean_of_pixels(self, x: Any) -> Any:
            return tf.reduce_mean(x, [1, 2])

        def concatenate(self, parts: list[Any]) -> Any:
            return tf.concat(parts, -1)

        def flatten(self, x: Any) -> Any:
            return tf.reshape(x, [x.shape[0], -1])

        def dropout(self, x: Any) -> Any:
            return x if self.dropout_key is None else tf.nn.dropout(x, 0.5)

    return TensorFlowLayers


def _multi_worker_strategy() -> Any:
    import tensorflow as tf

    from unisono.backends.tensorflow.distributed import closed_server

    addresses, rank = json.loads(os.environ["BENCH_ADDRESSES"]), int(os.environ["BENCH_RANK"])
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    # Its server listens on all addresses, and gives the user's files to anyone who connects.
    with closed_server(split_address(addresses[rank])[1]):
        return tf.distribute.MultiWorkerMirroredStrategy()
