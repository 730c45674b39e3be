"""Several parallel models in one process: alternating, sharing layers, one inside another."""

import gc
import weakref

import keras
import pytest
from keras import ops
from twins import BACKEND, TOLERANCE, adopted, apart, fit, mlp, plain, rows, sgd, state, twins

import unisono


def test_two_models_are_trained_in_turns():
    x, y = rows()
    wider = {"build": lambda: _sequential(7), "optimizer": keras.optimizers.Adam}
    pairs = [twins(), twins(**wider)]
    for _ in range(2):
        for expected, model in pairs:
            fit(expected, x, y)
            fit(model, x, y)
    for expected, model in pairs:
        assert apart(expected, model) <= TOLERANCE


def _sequential(width):
    parts = [keras.layers.Dense(width, activation="tanh"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((4,)), *parts])


def test_a_model_that_nobody_holds_is_collected():
    model = adopted()
    fit(model, *rows())
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


# -- adversaries -------------------------------------------------------------------------------


def _adversaries(adopt):
    """A critic, and a maker that is trained through the frozen critic: two models, one layer."""
    keras.utils.set_random_seed(1)
    critic = adopt(_compiled(_sequential(5)))
    critic.trainable = False
    maker = keras.layers.Dense(4, activation="tanh")
    inputs = keras.Input((4,))
    through = adopt(_compiled(keras.Model(inputs, critic(maker(inputs)))))
    critic.trainable = True
    return critic, through


def _compiled(model):
    model.compile(sgd(), "mse")
    return model


@pytest.mark.parametrize("which", ["both", "critic", "maker"])
def test_two_models_share_layers(which):
    x, y = rows()

    def adopt(model):
        is_critic = isinstance(model, keras.Sequential)
        is_chosen = which == "both" or is_critic == (which == "critic")
        return unisono.parallel(model, replicas=2) if is_chosen else model

    results = []
    for chosen in (lambda model: model, adopt):
        critic, through = _adversaries(chosen)
        for start in (0, 8, 16):
            batch = x[start : start + 8], y[start : start + 8]
            critic.train_on_batch(*batch)
            through.train_on_batch(batch[0], -batch[1])
        results.append([*state(critic), *state(through)])
    assert apart(*results) <= TOLERANCE


def test_a_layer_is_adopted_after_a_plain_model_has_trained_it():
    x, y = rows()
    results = []
    for is_parallel in (False, True):
        critic, through = _adversaries(lambda model: model)
        for _ in range(2):
            through.train_on_batch(x, y)
            critic.train_on_batch(x, y)
            if is_parallel:
                unisono.parallel(critic, replicas=2)
        results.append([*state(critic), *state(through), through.predict(x, verbose=0)])
    assert apart(*results) <= TOLERANCE


class Gan(keras.Model):
    """Two networks, two optimizers, a step of its own, and no `call`."""

    def __init__(self):
        super().__init__()
        self.maker = _sequential_to(4)
        self.critic = _sequential_to(1)

    def compile(self, maker_optimizer, critic_optimizer):
        super().compile()
        self.maker_optimizer = maker_optimizer
        self.critic_optimizer = critic_optimizer

    def critic_loss(self, x, noise):
        made = ops.square(self.critic(self.maker(noise)))
        return ops.mean(made) + ops.mean(ops.square(self.critic(x) - 1.0))

    def maker_loss(self, x, noise):
        return ops.mean(ops.square(self.critic(self.maker(noise)) - 1.0))

    def train_step(self, data):
        x, noise = data
        critic, maker = self.critic.trainable_weights, self.maker.trainable_weights
        logs = {}
        logs["critic"] = self._descend(self.critic_loss, x, noise, critic, self.critic_optimizer)
        logs["maker"] = self._descend(self.maker_loss, x, noise, maker, self.maker_optimizer)
        return logs

    def _descend(self, function, x, noise, weights, optimizer):
        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = function(x, noise)
            optimizer.apply(tape.gradient(loss, weights), weights)
            return loss
        self.zero_grad()
        loss = function(x, noise)
        loss.backward()
        optimizer.apply([weight.value.grad for weight in weights], weights)
        return loss.detach()


def _sequential_to(width):
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(width, activation="tanh")])


@pytest.mark.skipif(BACKEND == "jax", reason="a step of JAX is stateless: one optimizer a model")
@pytest.mark.parametrize("is_built", [True, False])
def test_a_gan_with_two_optimizers(is_built):
    if BACKEND == "torch" and not is_built:
        pytest.skip("plain Keras on torch fits a model without `call` only if it says it is built")
    x, _ = rows()
    noise = rows(seed=3)[0]
    results, histories = [], []
    for adopt in (lambda model: model, lambda model: unisono.parallel(model, replicas=2)):
        keras.utils.set_random_seed(2)
        gan = Gan()
        gan.built = is_built
        gan = adopt(gan)
        gan.compile(sgd(), keras.optimizers.Adam(0.01))
        histories.append(fit(gan, x, noise, epochs=2))
        optimizers = gan.maker_optimizer, gan.critic_optimizer
        assert [int(optimizer.iterations) for optimizer in optimizers] == [6, 6]
        variables = [*gan.weights, *optimizers[0].variables, *optimizers[1].variables]
        results.append([ops.convert_to_numpy(v) for v in variables])
    assert apart(*results) <= TOLERANCE
    assert apart(*histories) <= TOLERANCE


# -- teacher and student -----------------------------------------------------------------------


class Distiller(keras.Model):
    """A student that also learns from what a frozen teacher says."""

    def __init__(self, teacher, student):
        super().__init__()
        self.teacher, self.student = teacher, student
        self.teacher.trainable = False

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        own = super().compute_loss(x, y, y_pred, sample_weight, training)
        said = self.teacher(x, training=False)
        return own + 0.5 * ops.mean(ops.square(said - y_pred))


@pytest.mark.parametrize("is_teacher_parallel", [True, False])
def test_a_teacher_and_a_student(is_teacher_parallel):
    x, y = rows()
    results = []
    for replicas in (None, 2):
        teacher = plain()
        if replicas and is_teacher_parallel:
            unisono.parallel(teacher, replicas=replicas)
        fit(teacher, x, y)
        keras.utils.set_random_seed(5)
        distiller = Distiller(teacher, _sequential(3))
        if replicas:
            unisono.parallel(distiller, replicas=replicas)
        distiller.compile(sgd(), "mse")
        history = fit(distiller, x, y, epochs=2)
        results.append([*state(distiller), *history.values(), teacher.predict(x, verbose=0)])
    assert apart(*results) <= TOLERANCE


# -- one inside another ------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.slow), None])
def test_a_trained_model_becomes_part_of_a_larger_one(replicas):
    """Transfer learning: the larger model is parallel itself, on as many or more, or plain."""
    x, y = rows()
    results = []
    for is_parallel in (False, True):
        base = adopted() if is_parallel else plain()
        fit(base, x, y)
        keras.utils.set_random_seed(4)
        larger = keras.Sequential([keras.Input((4,)), base, keras.layers.Dense(1)])
        if is_parallel and replicas:
            unisono.parallel(larger, replicas=replicas)
        larger.compile(sgd(), "mse")
        fit(larger, x, y)
        fit(base, x, y)
        results.append([*state(larger), *state(base)])
    assert apart(*results) <= TOLERANCE


# -- JAX starts its CPU devices again ----------------------------------------------------------


@pytest.mark.skipif(BACKEND != "jax", reason="only JAX can have more CPU devices later")
def test_the_second_model_asks_for_more_devices():
    import jax

    x, y = rows()
    expected, first = twins()
    bystander = plain()
    held = jax.numpy.ones((2, 2))
    for model in (expected, first, bystander):
        fit(model, x, y)
    more = len(jax.devices("cpu")) + 1
    second = adopted(replicas=more)
    assert len(jax.devices("cpu")) == more
    for model in (expected, first, bystander):
        fit(model, x, y)
    fit(second, x, y, epochs=2)
    for model in (first, bystander, second):
        assert apart(expected, model) <= TOLERANCE
        assert apart([expected.predict(x, verbose=0)], [model.predict(x, verbose=0)]) <= TOLERANCE
    assert float((held + 1).sum()) == 8.0
    assert mlp()(x).shape == (24, 1)
