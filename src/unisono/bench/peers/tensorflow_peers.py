"""TensorFlow's own strategies."""

import json
import os
from typing import Any

from unisono.bench.nets import PER_REPLICA, data, make
from unisono.bench.passes import Pass, fit_pass, loop_pass


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
    """MultiWorkerMirroredStrategy: with Keras 3 its `fit` is broken, so a loop over one batch."""
    import keras
    import tensorflow as tf

    addresses = json.loads(os.environ["BENCH_ADDRESSES"])
    task = {"type": "worker", "index": int(os.environ["BENCH_RANK"])}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make(net)
        optimizer = keras.optimizers.SGD(5e-3, momentum=0.9)
        optimizer.build(model.trainable_variables)
    x, y = data(net, PER_REPLICA[net])
    loss_of = model._loss_tracker and keras.losses.get(model.loss)
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
