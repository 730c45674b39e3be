"""Replicas that TensorFlow runs as threads of one process keep their Python-side state apart."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono
from unisono.compat import MirroredStrategy

if keras.backend.backend() != "tensorflow":
    pytest.skip("about TensorFlow's replicas", allow_module_level=True)

import tensorflow as tf

X = np.linspace(-1.0, 1.0, 32, dtype="float32").reshape(8, 4)
Y = X[:, :1] - X[:, 1:2]


# -- attributes -----------------------------------------------------------------------------------


class Counting(keras.Model):
    """Counts its calls, and keeps what it saw, in a number, a list, a dict and a set."""

    def __init__(self):
        super().__init__()
        self.norm, self.top = layers.BatchNormalization(), layers.Dense(1)
        self.num_calls, self.calls, self.by_call, self.numbers = 0, [], {}, set()

    def call(self, inputs, training=False):
        self.num_calls += 1
        self.calls.append(self.num_calls)
        outputs = self.norm(inputs, training=training)
        self.by_call[self.num_calls] = self.calls[-1]
        self.numbers.add(self.num_calls)
        return self.top(outputs)


def test_attributes_are_those_of_one_device():
    found = []
    for replicas in (1, 2):
        keras.utils.set_random_seed(1)
        model = Counting()
        model(X)
        model = unisono.parallel(model, replicas=replicas)
        model.compile("sgd", "mse", run_eagerly=True)
        model.fit(X, Y, batch_size=4, epochs=1, verbose=0)  # Two steps; symbolic calls are more.
        before = model.num_calls
        model.fit(X, Y, batch_size=4, epochs=1, verbose=0)
        assert model.num_calls == before + 2
        assert model.calls == list(range(1, before + 3))
        assert model.by_call == {i: i for i in model.calls}
        assert model.numbers == set(model.calls)
        found.append(model.get_weights())
    assert max(np.abs(a - b).max() for a, b in zip(*found, strict=True)) <= 1e-5


class Helper:
    """Of the program itself, and unknown to Keras."""

    hidden = None


class Deep(keras.Model):
    """Keeps tensors across batch norm where only it knows of them, and counts in a tf.Variable."""

    def __init__(self):
        super().__init__()
        self.below, self.norm, self.top = (
            layers.Dense(3),
            layers.BatchNormalization(),
            layers.Dense(1),
        )
        self.helper, self.nested, self.by_name = Helper(), [[None]], {"hidden": {"last": []}}
        self.num_steps = tf.Variable(0.0, trainable=False)

    def call(self, inputs, training=False):
        hidden = self.below(inputs)
        self.helper.hidden, self.nested[0][0] = hidden, hidden
        self.by_name["hidden"]["last"].append(hidden)
        if training:
            self.num_steps.assign_add(1.0)
        outputs = self.norm(hidden, training=training)
        kept = self.helper.hidden + self.nested[0][0] + self.by_name["hidden"]["last"].pop()
        return self.top(outputs + 0.1 * kept) * (1.0 + 0.1 * self.num_steps)


@pytest.mark.parametrize("is_eager", [False, True])
def test_deeper_state_and_variables_of_tensorflow_are_those_of_one_device(is_eager):
    found = []
    for replicas in (1, 3):
        keras.utils.set_random_seed(1)
        model = Deep()
        model(X)
        model = unisono.parallel(model, replicas=replicas)
        model.compile(keras.optimizers.SGD(0.02), "mse", run_eagerly=is_eager)
        losses = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
        assert float(model.num_steps) == 4.0
        model.num_steps.assign(0.0)
        losses += model.fit(X, Y, batch_size=4, epochs=1, shuffle=False, verbose=0).history["loss"]
        assert float(model.num_steps) == 2.0
        found.append([np.asarray(losses), *model.get_weights()])
    assert max(np.abs(a - b).max() for a, b in zip(*found, strict=True)) <= 1e-5


def test_replicas_have_the_callers_settings_of_keras():
    policies = []

    class Asks(layers.Layer):
        def call(self, inputs):
            policies.append(keras.config.dtype_policy().name)
            return inputs

    model = keras.Sequential([keras.Input((4,)), Asks(), layers.Dense(1)])
    model = unisono.parallel(model, replicas=2)
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        policies.clear()
        model.predict(X, verbose=0)
    finally:
        keras.config.set_dtype_policy("float32")
    assert set(policies) == {"mixed_bfloat16"}


# -- keras.random without a seed ------------------------------------------------------------------


class Draws(layers.Layer):
    """Gives out what it draws without a seed."""

    def call(self, inputs):
        return inputs * 0.0 + keras.random.normal(ops.shape(inputs))


class NoisyStep(keras.Model):
    def train_step(self, data):
        x, y = data
        return super().train_step((x + 0.1 * keras.random.normal(ops.shape(x)), y))


def drawing(**options):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), Draws()])
    model = unisono.parallel(model, **options)
    model.compile(run_eagerly=False)
    return model


def test_every_replica_draws_its_own_and_again_the_same_from_a_seed():
    first = drawing(replicas=2).predict(X, batch_size=4, verbose=0)
    assert len(np.unique(first)) == first.size  # Neither replicas nor steps share a number.
    outside = keras.ops.convert_to_numpy(keras.random.normal((8, 4)))
    assert not np.intersect1d(first, outside).size
    again = drawing(replicas=2)
    assert (again.predict(X, batch_size=4, verbose=0) == first).all()
    assert (keras.ops.convert_to_numpy(keras.random.normal((8, 4))) == outside).all()
    unisono.release(again)
    assert again.predict(X, verbose=0).shape == (8, 4)


def test_draws_of_a_train_step_and_of_a_new_seed():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    model = unisono.parallel(NoisyStep(inputs, layers.Dense(1)(inputs)), replicas=2)
    model.compile("sgd", "mse")
    losses = model.fit(X, Y, batch_size=4, epochs=1, verbose=0).history["loss"]
    keras.utils.set_random_seed(4)  # Which takes Keras' global seed generator away.
    losses += model.fit(X, Y, batch_size=4, epochs=1, verbose=0).history["loss"]
    assert np.isfinite(losses).all()
    assert np.isfinite(model.evaluate(X, Y, verbose=0))


def test_draws_of_a_custom_loop():
    strategy = unisono.Strategy(replicas=2)
    (batch,) = strategy.distribute_dataset([X])

    def step(x):
        return x * 0.0 + keras.random.normal(ops.shape(x))

    for run in (strategy.run, tf.function(strategy.run)):
        drawn = np.asarray(strategy.gather(run(step, args=(batch,))))
        assert len(np.unique(drawn)) == drawn.size == 32


# -- optimizers of custom loops -------------------------------------------------------------------


def loop(strategy, optimizer, model):
    """Two steps of the loop of TensorFlow's guide; the losses and the weights."""
    loss_of = keras.losses.MeanSquaredError(reduction=None)

    def step(x, y):
        with tf.GradientTape() as tape:
            each = loss_of(y, model(x, training=True))
            loss = unisono.compute_average_loss(each, global_batch_size=4)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    if strategy is None:
        losses = [float(step(*batch)) for batch in data]
    else:
        run = tf.function(lambda batch: strategy.reduce("SUM", strategy.run(step, args=batch)))
        losses = [float(run(batch)) for batch in strategy.experimental_distribute_dataset(data)]
    return [np.asarray(losses), *model.get_weights()]


def test_an_optimizer_built_in_the_scope_of_simulated_gpus(monkeypatch):
    monkeypatch.setenv("UNISONO_SIMULATED_GPUS", "2")
    strategy = MirroredStrategy(devices=["GPU:0", "GPU:1"])
    results = []
    for scope in (None, strategy.scope()):
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.1)
        if scope is not None:
            with scope:
                model = keras.models.clone_model(source := model)
                optimizer.build(model.trainable_variables)
            model.set_weights(source.get_weights())
        results.append(loop(scope and strategy, optimizer, model))
    assert max(np.abs(a - b).max() for a, b in zip(*results, strict=True)) <= 1e-5


# -- strategies of tf.distribute ------------------------------------------------------------------


def build_in_scope():
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        return keras.Sequential([keras.Input((4,)), layers.Dense(1)])


def compile_in_scope():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model.compile("adam", "mse")
    return model


@pytest.mark.parametrize("make", [build_in_scope, compile_in_scope])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_model_under_a_strategy_of_tensorflow_is_refused(make, replicas):
    with pytest.raises(unisono.ModelError, match=r"Strategy of tf\.distribute.*unisono\.Strategy"):
        unisono.parallel(make(), replicas=replicas)


def test_a_call_under_a_strategy_of_tensorflow_is_refused():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    with (
        tf.distribute.OneDeviceStrategy("CPU:0").scope(),
        pytest.raises(unisono.ModelError, match="OneDeviceStrategy"),
    ):
        unisono.parallel(model, replicas=2)


# -- ragged and sparse ----------------------------------------------------------------------------


class Doubling(keras.Model):
    def call(self, inputs):
        return inputs * 2.0


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_ragged_and_sparse_outputs_stay_what_they_are(kind):
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0, 5.0, 6.0], [7.0]])
    rows = ragged if kind == "ragged" else ragged.to_sparse()
    model = unisono.parallel(Doubling(), replicas=2)
    model.compile("sgd", lambda y, y_pred: 0.0 * tf.reduce_sum(ragged.flat_values))
    model.fit(rows, np.zeros((5, 1)), batch_size=3, verbose=0)
    found = model.predict(rows, batch_size=3, verbose=0)
    assert type(found) is type(rows)
    if kind == "sparse":
        found = tf.sparse.to_dense(found)
        assert found.numpy().tolist() == (2.0 * ragged.to_tensor()).numpy().tolist()
    else:
        assert found.to_list() == (2.0 * ragged).to_list()
