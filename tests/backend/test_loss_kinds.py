"""A user's losses: means and sums over rows are told apart, and what is neither is named."""

import importlib
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops
from twins import BACKEND

import unisono

if BACKEND == "jax":
    pytest.skip("on JAX a step sees the global batch", allow_module_level=True)

ROWS, FEATURES, RATE = 13, 4, 0.01
slow_where_traced = pytest.mark.slow if BACKEND == "tensorflow" else lambda test: test


class Stepped(keras.Model):
    """Minimizes `loss_of(y_pred)` in a train_step of its own."""

    def __init__(self, loss_of, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_of = loss_of
        self.tracker = keras.metrics.Mean(name="loss")
        self.num_steps = 0
        self.losses_seen = []
        self.native_steps = {}

    def train_step(self, data):
        x, _ = data
        self.num_steps += 1
        for steps in self.native_steps.values():
            steps.add_(1.0) if BACKEND == "torch" else steps.assign_add(1.0)
        self.losses_seen.append(self.num_steps)
        weights = self.trainable_weights
        if BACKEND == "torch":
            import torch

            self.zero_grad()
            loss = self.loss_of(self(x, training=True))
            loss.sum().backward()
            with torch.no_grad():
                self.optimizer.apply([w.value.grad for w in weights], weights)
        else:
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = self.loss_of(self(x, training=True))
            self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def stepped(loss_of, *more_layers):
    keras.utils.set_random_seed(3)
    inputs = hidden = keras.Input((FEATURES,))
    for layer in more_layers:
        hidden = layer(hidden)
    model = Stepped(loss_of, inputs, layers.Dense(2, name="last")(hidden), name="net")
    model.compile(keras.optimizers.SGD(RATE, name="descent"))
    return model


def fit(model, **options):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(ROWS, FEATURES)).astype("float32")
    return model.fit(x, x, batch_size=ROWS, verbose=0, **options)


def warned_of(model):
    """The warnings of a fit of two epochs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, epochs=2)
    return [str(one.message) for one in caught if "Stepped" in str(one.message)]


def mean_and_sum(y_pred):
    return ops.mean(y_pred**2) + ops.sum(y_pred**4)


def mean_of_unmasked(y_pred):
    """Twice the rows do not change it, but replicas have different numbers of unmasked entries."""
    mask = ops.cast(y_pred > 0.0, y_pred.dtype)
    return ops.sum(mask * y_pred**2) / ops.sum(mask)


@pytest.mark.parametrize("loss_of", [mean_and_sum, mean_of_unmasked])
def test_what_is_neither_is_named_once(loss_of):
    (said,) = warned_of(unisono.parallel(stepped(loss_of), replicas=2))
    for part in ("Stepped 'net'", "train_step", "optimizer descent", "neither a mean nor a sum"):
        assert part in said


@pytest.mark.skipif(BACKEND != "tensorflow", reason="only TensorFlow traces a step")
def test_a_step_is_traced_once_although_its_first_batch_is_tried():
    import tensorflow as tf

    traced = []

    def total(y_pred):
        traced.append(not tf.executing_eagerly())
        return ops.sum(y_pred)

    model = unisono.parallel(stepped(total), replicas=2)
    model.fit(*[np.ones((10, FEATURES))] * 2, batch_size=4, epochs=2, verbose=0)
    assert traced.count(True) == 2  # Once for each replica.
    assert int(model.optimizer.iterations) == 6


class Noise(layers.Layer):
    """Adds what Keras draws, and what the backend draws by itself."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(5)

    def call(self, inputs):
        noise = keras.random.normal(ops.shape(inputs), seed=self.seeds)
        if BACKEND == "torch":
            import torch

            return inputs + noise + torch.randn_like(noise)
        import tensorflow as tf

        return inputs + noise + tf.random.normal(tf.shape(noise))


def test_random_layers_and_draws_do_not_hide_a_sum():
    if BACKEND == "tensorflow":
        fit(unisono.parallel(stepped(ops.sum), replicas=2))
        importlib.import_module("tensorflow.random")  # From here `tf.random` is another module.
    model = stepped(ops.sum, layers.Dense(3), layers.Dropout(0.5, seed=2), Noise())
    assert warned_of(unisono.parallel(model, replicas=2)) == []
    # The gradient of the bias is the number of rows, whatever is drawn.
    bias = ops.convert_to_numpy(model.get_layer("last").bias)
    np.testing.assert_allclose(bias, [-2 * ROWS * RATE] * 2, rtol=1e-6)


def noisy_labels(y_pred):
    """As in Keras' example of a GAN: noise for the rows of two batches in one tensor, and mixup."""
    both = ops.concatenate([y_pred, y_pred * 2.0])
    noise = keras.random.uniform(ops.shape(both), seed=1)
    return ops.mean((both + keras.random.shuffle(both, seed=2) - noise) ** 2)


class OfCompiledLoss(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


def compiled_dice():
    """Not a mean over rows, but the compiled loss gets the rows of all replicas."""
    inputs = keras.Input((FEATURES,))
    model = OfCompiledLoss(inputs, layers.Dense(FEATURES, "sigmoid")(inputs), name="Stepped")
    model.compile("sgd", keras.losses.Dice())
    return model


@pytest.mark.parametrize("make", [lambda: stepped(noisy_labels), compiled_dice])
def test_means_of_any_form_are_not_named(make):
    assert warned_of(unisono.parallel(make(), replicas=2)) == []


def test_the_check_leaves_no_trace():
    def run(adopt):
        model = adopt(stepped(ops.sum, layers.BatchNormalization(), layers.Dropout(0.5, seed=2)))
        fit(model)
        seeds = [v for v in model.variables if v.name == "seed_generator_state"]
        norm = model.layers[1]
        return {
            "seeds": [np.asarray(ops.convert_to_numpy(v)).tolist() for v in seeds],
            "iterations": int(ops.convert_to_numpy(model.optimizer.iterations)),
            "count": float(ops.convert_to_numpy(model.tracker.count)),
            "moving": ops.convert_to_numpy(norm.moving_variance),
        }

    expected = run(lambda model: model)
    actual = run(lambda model: unisono.parallel(model, replicas=2))
    np.testing.assert_allclose(actual.pop("moving"), expected.pop("moving"), rtol=1e-5)
    assert actual == expected


@slow_where_traced
def test_attributes_and_generators_are_put_back():
    steps = []

    class Noting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            native = {float(steps) for steps in self.model.native_steps.values()}
            steps.append((self.model.num_steps, native, list(self.model.losses_seen)))

    model = stepped(ops.sum)
    if BACKEND == "torch":
        import torch

        model.register_buffer("native_buffer", torch.zeros(()))
        model.native_steps = {"buffer": model.native_buffer}
    else:
        import tensorflow as tf

        model.native_steps = {"variable": tf.Variable(0.0, trainable=False)}
    unisono.parallel(model, replicas=2)
    # Eagerly, so that TensorFlow's variable is read as it is; in a dict, its replicas share it.
    model.compile(keras.optimizers.SGD(RATE), run_eagerly=True)
    state = np.random.get_state()[1].copy()
    fit(model, epochs=1, shuffle=False, callbacks=[Noting()])
    assert steps == [(1, {1 if BACKEND == "torch" else 2}, [1])]
    np.testing.assert_array_equal(np.random.get_state()[1], state)


UNSEEDED = """
import keras, numpy as np, unisono
from keras import ops

class Penalty(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(ops.sum(inputs))
        return inputs

model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), Penalty()])
model.compile("sgd", "mse")
unisono.parallel(model, replicas=2).fit(np.ones((4, 2)), np.ones((4, 2)), verbose=0)
"""


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "tensorflow", reason="torch always has a generator")
def test_a_program_without_a_seed_is_looked_at_too(plain_python):
    done = plain_python(["-W", "error::UserWarning", "-c", UNSEEDED], KERAS_BACKEND=BACKEND)
    assert done.returncode == 0, done.stderr


@slow_where_traced
def test_a_new_compile_is_looked_at_anew():
    model = unisono.parallel(stepped(ops.sum), replicas=2)
    fit(model)
    before = ops.convert_to_numpy(model.get_layer("last").bias)
    model.loss_of = lambda y_pred: ops.mean(y_pred)
    model.compile(keras.optimizers.SGD(RATE))
    fit(model)
    after = ops.convert_to_numpy(model.get_layer("last").bias)
    np.testing.assert_allclose(after - before, [-RATE / 2] * 2, rtol=1e-4)


def test_a_model_of_means_runs_its_steps_only():
    calls = []

    class Counted(layers.Layer):
        def call(self, inputs):
            calls.append(1)
            return inputs

    model = keras.Sequential([keras.Input((FEATURES,)), Counted(), layers.Dense(FEATURES)])
    unisono.parallel(model, replicas=2).compile("sgd", "mse", run_eagerly=True)
    model.train_on_batch(np.ones((4, FEATURES)), np.ones((4, FEATURES)))
    calls.clear()
    model.compile("sgd", "mse", run_eagerly=True)
    model.train_on_batch(np.ones((4, FEATURES)), np.ones((4, FEATURES)))
    with_spec = len(calls)  # Keras builds by a symbolic call after `compile`.
    model.train_on_batch(np.ones((4, FEATURES)), np.ones((4, FEATURES)))
    assert len(calls) - with_spec == (1 if BACKEND == "torch" else 2)
    assert with_spec <= len(calls) - with_spec + 1
