"""Training loops written by hand under `unisono.Strategy`; in one process, so not on torch."""

from typing import Any

import keras
import numpy as np
from keras import layers

import unisono
from exactness.case import Adopt, Results, by_position, optimizer_state, replicas_of
from exactness.cases.train_steps import TRAIN_STEPS
from exactness.exercise import GLOBAL_BATCH, NUM_FEATURES, regression, stacked

IN_ONE_PROCESS = {"torch": "a loop of torch runs in one process per replica (tests/backend)"}

EPOCHS = 3


def net() -> Any:
    return stacked(
        layers.Dense(5, use_bias=False),
        layers.BatchNormalization(epsilon=0.1),
        layers.Activation("tanh"),
        layers.Dense(2),
        shape=(NUM_FEATURES,),
    )


def batches() -> list[Any]:
    task = regression()
    starts = range(0, len(task.x), GLOBAL_BATCH)
    return [(task.x[i : i + GLOBAL_BATCH], task.y[i : i + GLOBAL_BATCH]) for i in starts]


def average(y: Any, y_pred: Any) -> Any:
    each = keras.losses.MeanSquaredError(reduction=None)(y, y_pred)
    return unisono.compute_average_loss(each)


@TRAIN_STEPS.case(
    "custom training loop with `Strategy`, optimizer built in the scope",
    unpromised=IN_ONE_PROCESS,
    sharpest=2,
)
def loop_built_in_scope(adopt: Adopt) -> Results:
    replicas = replicas_of(adopt)
    strategy = None if replicas is None else unisono.Strategy(replicas=replicas)
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
    if strategy is None:
        model = net()
        optimizer.build(model.trainable_variables)
    else:
        with strategy.scope():
            model = net()
            optimizer.build(model.trainable_variables)
    train = {"jax": train_jax, "tensorflow": train_tensorflow}[keras.backend.backend()]
    losses = train(strategy, model, optimizer)
    weights = by_position(model.weights)
    return {"losses": losses, "weights": weights, "optimizer": optimizer_state(optimizer)}


def train_tensorflow(strategy: Any, model: Any, optimizer: Any) -> list[float]:
    import tensorflow as tf

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = average(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    x, y = (np.concatenate(part) for part in zip(*batches(), strict=True))
    data: Any = tf.data.Dataset.from_tensor_slices((x, y)).batch(GLOBAL_BATCH)
    if strategy is None:
        run = tf.function(step)
        return [float(run(*batch)) for _ in range(EPOCHS) for batch in data]
    data = strategy.distribute_dataset(data)
    run = tf.function(lambda batch: strategy.reduce("sum", strategy.run(step, args=batch)))
    return [float(run(batch)) for _ in range(EPOCHS) for batch in data]


def train_jax(strategy: Any, model: Any, optimizer: Any) -> list[float]:
    import jax

    def loss_of(trainable: Any, other: Any, x: Any, y: Any) -> Any:
        y_pred, other = model.stateless_call(trainable, other, x, training=True)
        return average(y, y_pred), other

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        trainable, other, slots = state
        gradient = jax.value_and_grad(loss_of, has_aux=True)
        (loss, other), gradients = gradient(trainable, other, *batch)
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        return loss, (trainable, other, slots)

    parts = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    state: Any = keras.tree.map_structure(lambda variable: variable.value, parts)
    data: Any = batches()
    if strategy is not None:
        state, data = strategy.replicate(parts), strategy.distribute_dataset(data)
    losses = []
    for _ in range(EPOCHS):
        for batch in data:
            if strategy is None:
                loss, state = step(state, batch)
            else:
                loss, state = strategy.run(step, args=(state, batch))
                loss = strategy.reduce("sum", loss)
            losses.append(float(loss))
    for variables, values in zip(parts, state, strict=True):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
    return losses
