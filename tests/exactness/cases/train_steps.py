"""Models with a `train_step` of their own, written for each backend as the Keras guides do.

What such a step computes counts as a mean over the batch on TensorFlow and torch.
"""

from typing import Any

import keras
from keras import layers, ops

from exactness.case import Adopt, Group, Results, by_position, optimizer_state, state_of
from exactness.exercise import (
    NUM_FEATURES,
    TEST_ROWS,
    evaluate,
    fit,
    regression,
    row_weights,
    sgd,
    train,
)

TRAIN_STEPS = Group("Own train_step")


class TensorFlowStep:
    """Guide "Customizing fit with TensorFlow": tape, gradients, apply, metrics."""

    def train_step(self: Any, data: Any) -> Any:
        import tensorflow as tf

        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return updated(self, loss, y, y_pred, sample_weight)


class TorchStep:
    """Guide "Customizing fit with PyTorch": zero_grad, backward, apply, metrics."""

    def train_step(self: Any, data: Any) -> Any:
        import torch

        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        self.zero_grad()
        y_pred = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        loss.backward()
        gradients = [v.value.grad for v in self.trainable_weights]
        with torch.no_grad():
            self.optimizer.apply(gradients, self.trainable_weights)
        return updated(self, loss, y, y_pred, sample_weight)


def updated(model: Any, loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
    for metric in model.metrics:
        if metric.name == "loss":
            metric.update_state(loss)
        else:
            metric.update_state(y, y_pred, sample_weight=sample_weight)
    return {metric.name: metric.result() for metric in model.metrics}


class JaxStep:
    """Guide "Customizing fit with JAX": everything stateless."""

    def own_loss(
        self: Any, trainable: Any, non_trainable: Any, x: Any, y: Any, sample_weight: Any
    ) -> Any:
        y_pred, non_trainable = self.stateless_call(trainable, non_trainable, x, training=True)
        loss = self.compute_loss(x, y, y_pred, sample_weight)
        return loss, (y_pred, non_trainable)

    def train_step(self: Any, state: Any, data: Any) -> Any:
        import jax

        trainable, non_trainable, optimizer, metrics = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        gradient_of = jax.value_and_grad(self.own_loss, has_aux=True)
        (loss, (y_pred, non_trainable)), gradients = gradient_of(
            trainable, non_trainable, x, y, sample_weight
        )
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        logs, metrics = updated_stateless(self, metrics, loss, y, y_pred, sample_weight)
        return logs, (trainable, non_trainable, optimizer, metrics)


def updated_stateless(
    model: Any, variables: Any, loss: Any, y: Any, y_pred: Any, sample_weight: Any
) -> Any:
    logs, after = {}, []
    for metric in model.metrics:
        count = len(metric.variables)
        own, variables = variables[:count], variables[count:]
        if metric.name == "loss":
            own = metric.stateless_update_state(own, loss)
        else:
            own = metric.stateless_update_state(own, y, y_pred, sample_weight=sample_weight)
        logs[metric.name] = metric.stateless_result(own)
        after += own
    return logs, after


STEPS: dict[str, type] = {"tensorflow": TensorFlowStep, "torch": TorchStep, "jax": JaxStep}
Step: Any = STEPS.get(keras.backend.backend(), TensorFlowStep)


class OwnStep(Step, keras.Model):
    """A functional model with the train_step of this backend."""


def own_step_model() -> Any:
    inputs = keras.Input((NUM_FEATURES,))
    hidden = layers.BatchNormalization()(layers.Dense(5, use_bias=False)(inputs))
    return OwnStep(inputs, layers.Dense(2)(layers.Activation("tanh")(hidden)))


@TRAIN_STEPS.case("`train_step` with `compute_loss` and compiled metrics")
def own_train_step(adopt: Adopt) -> Results:
    # Such a step averages the batches' losses without their sizes: a remainder weighs in full.
    model, task = adopt(own_step_model()), regression()
    model.compile(sgd(), "mse", metrics=[keras.metrics.MeanAbsoluteError(name="mae")])
    history = fit(model, task.x, task.y)
    return {"history": history, "evaluate": evaluate(model, task.x, task.y), **state_of(model)}


@TRAIN_STEPS.case("`train_step` with sample weights, under Adam with clipping")
def own_train_step_weighted(adopt: Adopt) -> Results:
    weights = (row_weights(), row_weights(TEST_ROWS))
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.1)
    return train(adopt(own_step_model()), weights=weights, optimizer=optimizer)


class StatefulTest:
    """A test_step for TensorFlow and torch."""

    def test_step(self: Any, data: Any) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        return updated(self, ops.mean(ops.abs(y - y_pred)), y, y_pred, sample_weight)


class StatelessTest:
    """A test_step for JAX."""

    def test_step(self: Any, state: Any, data: Any) -> Any:
        trainable, non_trainable, metrics = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred, non_trainable = self.stateless_call(trainable, non_trainable, x, training=False)
        loss = ops.mean(ops.abs(y - y_pred))
        logs, metrics = updated_stateless(self, metrics, loss, y, y_pred, sample_weight)
        return logs, (trainable, non_trainable, metrics)


Test: Any = StatelessTest if keras.backend.backend() == "jax" else StatefulTest


class OwnEvaluation(Test, keras.Model):
    """Plain training and a test_step of its own."""


@TRAIN_STEPS.case("own `test_step`")
def own_test_step(adopt: Adopt) -> Results:
    inputs = keras.Input((NUM_FEATURES,))
    model, task = adopt(OwnEvaluation(inputs, layers.Dense(2)(inputs))), regression()
    model.compile(sgd(), "mse", metrics=[keras.metrics.MeanSquaredError(name="squares")])
    history = fit(model, task.x, task.y, epochs=2)
    return {"history": history, "evaluate": evaluate(model, task.x, task.y), **state_of(model)}


class TwoOptimizers(keras.Model):
    """A model and its critic, each stepped by its own optimizer, as the GAN guides do."""

    def __init__(self) -> None:
        super().__init__()
        self.main = keras.Sequential([keras.Input((NUM_FEATURES,)), layers.Dense(2)])
        self.critic = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
        self.built = True

    def compile(self, main_optimizer: Any, critic_optimizer: Any) -> None:
        super().compile()
        self.main_optimizer = main_optimizer
        self.critic_optimizer = critic_optimizer
        self.tracker = keras.metrics.Mean(name="main_loss")

    @property
    def metrics(self) -> Any:
        return [self.tracker]

    def call(self, inputs: Any) -> Any:
        return self.main(inputs)

    def main_loss(self, x: Any, y: Any) -> Any:
        output = self.main(x)
        return ops.mean(ops.square(output - y)) + ops.mean(ops.square(self.critic(output)))

    def critic_loss(self, x: Any, y: Any) -> Any:
        return ops.mean(ops.square(self.critic(y) - 1.0)) + ops.mean(self.critic(self.main(x)))

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.step(self.critic_loss, x, y, self.critic_optimizer, self.critic.trainable_weights)
        loss = self.step(self.main_loss, x, y, self.main_optimizer, self.main.trainable_weights)
        self.tracker.update_state(loss)
        return {"main_loss": self.tracker.result()}

    def step(self, loss_of: Any, x: Any, y: Any, optimizer: Any, weights: Any) -> Any:
        if keras.backend.backend() == "torch":
            import torch

            self.zero_grad()
            loss = loss_of(x, y)
            loss.backward()
            with torch.no_grad():
                optimizer.apply([w.value.grad for w in weights], weights)
            return loss
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_of(x, y)
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss


@TRAIN_STEPS.case(
    "two optimizers in one `train_step`",
    lacks={"jax": "Keras hands a stateless `train_step` the variables of one optimizer"},
)
def two_optimizers(adopt: Adopt) -> Results:
    model, task = adopt(TwoOptimizers()), regression()
    model.compile(sgd(), keras.optimizers.Adam(0.01))
    history = fit(model, task.x, task.y)
    optimizers = [optimizer_state(model.main_optimizer), optimizer_state(model.critic_optimizer)]
    return {"history": history, "optimizers": optimizers, "weights": by_position(model.weights)}


class OfEachExample(keras.Model):
    """Keras' example of masked language modelling: a step that minimizes a loss for each example.

    TensorFlow's tape takes the gradient of their sum; torch wants to be told so.
    """

    def train_step(self, *args: Any) -> Any:
        if keras.backend.backend() == "jax":
            return self.stateless_train_step(*args)
        x, y = args[0]
        if keras.backend.backend() == "torch":
            import torch

            self.zero_grad()
            loss = self.losses_of(y, self(x, training=True))
            loss.sum().backward()
            with torch.no_grad():
                gradients = [v.value.grad for v in self.trainable_weights]
                self.optimizer.apply(gradients, self.trainable_weights)
        else:
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = self.losses_of(y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result(), "sum": ops.sum(loss)}

    def stateless_train_step(self, state: Any, data: Any) -> Any:
        import jax

        x, y = data
        trainable, non_trainable, optimizer, metrics = state

        def loss_of(trainable: Any) -> Any:
            y_pred, others = self.stateless_call(trainable, non_trainable, x, training=True)
            loss = self.losses_of(y, y_pred)
            return ops.sum(loss), (loss, others)

        (total, (loss, non_trainable)), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            trainable
        )
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        metrics = self.tracker.stateless_update_state(metrics, loss)
        logs = {"loss": self.tracker.stateless_result(metrics), "sum": total}
        return logs, (trainable, non_trainable, optimizer, metrics)

    def losses_of(self, y: Any, y_pred: Any) -> Any:
        return keras.losses.MeanSquaredError(reduction=None)(y, y_pred)

    def compile(self, optimizer: Any) -> None:
        super().compile(optimizer)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> Any:
        return [self.tracker]


@TRAIN_STEPS.case("`train_step` that minimizes a loss for each example")
def losses_of_examples(adopt: Adopt) -> Results:
    inputs = keras.Input((NUM_FEATURES,))
    hidden = layers.Dense(5, "tanh")(inputs)
    model, task = adopt(OfEachExample(inputs, layers.Dense(2)(hidden))), regression()
    model.compile(keras.optimizers.SGD(0.003, momentum=0.9))
    # A last batch of one row, which is fewer than replicas.
    return {"history": fit(model, task.x[:37], task.y[:37]), **state_of(model)}


class OneSums(TwoOptimizers):
    """One optimizer gets a sum over the batch, the other a mean."""

    def critic_loss(self, x: Any, y: Any) -> Any:
        return ops.sum(ops.square(self.critic(y) - 1.0)) + ops.sum(self.critic(self.main(x)))


@TRAIN_STEPS.case(
    "two optimizers in one `train_step`, of which one gets a sum",
    lacks={"jax": "Keras hands a stateless `train_step` the variables of one optimizer"},
)
def two_optimizers_one_sum(adopt: Adopt) -> Results:
    model, task = adopt(OneSums()), regression()
    model.compile(sgd(), keras.optimizers.SGD(0.003))
    history = fit(model, task.x, task.y)
    return {"history": history, "weights": by_position(model.weights)}
