"""Whatever goes wrong, the model keeps its values and the next call works."""

import sys
import warnings

import keras
import numpy as np
import pytest
from scripts import run
from twins import BACKEND, TOLERANCE, adopted, apart, fit, plain, rows, sgd, state, trained

import unisono

CALLS = ["fit", "evaluate", "predict"]
# Workers of torch end with any error of a step, and it takes seconds to start others.
CALLS_WITH_STEPS = ["predict"] if BACKEND == "torch" else CALLS


def assert_unharmed(model):
    """After one epoch, the model has the values of then, and trains on as if nothing was."""
    assert apart(trained(1), state(model)) <= TOLERANCE
    fit(model, *rows())
    assert apart(trained(2), state(model)) <= TOLERANCE


@pytest.fixture
def model():
    model = adopted()
    fit(model, *rows())
    return model


# -- what is asked of `parallel` ---------------------------------------------------------------


@pytest.mark.parametrize("thing", [None, "model", keras.layers.Dense(1), keras.Model, object()])
def test_what_is_no_model_is_refused(thing):
    with pytest.raises(unisono.ModelError, match=r"takes a keras\.Model"):
        unisono.parallel(thing, replicas=2)


@pytest.mark.parametrize("thing", [None, "x", 1])
@pytest.mark.parametrize("name", ["release", "check_replicas"])
def test_other_calls_refuse_it_too(name, thing):
    with pytest.raises(unisono.ModelError, match=rf"unisono\.{name} takes a keras\.Model"):
        getattr(unisono, name)(thing)


@pytest.mark.parametrize(
    "call",
    [
        lambda: unisono.spawn("x", replicas=2),
        lambda: unisono.spawn(None, replicas=2),
        lambda: unisono.spawn(print, "x", replicas=2),
        lambda: unisono.spawn(print, 5, replicas=2),
        lambda: unisono.spawn(print, kwargs={1: 2}, replicas=2),
        lambda: unisono.Strategy(replicas=2).run("x"),
        lambda: unisono.Strategy(replicas=2).run(print, 5),
        lambda: unisono.Strategy(replicas=2).run(print, (), 5),
        lambda: unisono.compute_average_loss(None),
        lambda: unisono.compute_average_loss("x"),
        lambda: unisono.compute_average_loss([1.0], sample_weight="x"),
        lambda: unisono.scale_regularization_loss(None),
    ],
)
def test_what_cannot_be_called_or_averaged_is_refused(call):
    with pytest.raises(unisono.errors.StrategyError, match="Asked"):
        call()


@pytest.mark.parametrize("every_s", ["x", 0, -1, None, True, float("nan")])
def test_an_interval_that_is_none_is_refused(every_s):
    with pytest.raises(unisono.ConfigurationError, match="every_s="):
        unisono.callbacks.DeviceStats(every_s=every_s)


@pytest.mark.parametrize("entry", ["parallel", "Strategy", "spawn", "variable", "gpus"])
def test_a_number_of_replicas_that_no_machine_has(entry, monkeypatch):
    monkeypatch.delenv("UNISONO_OVERSUBSCRIBE", raising=False)
    found = r"this machine has \d+ core"
    if entry == "variable":
        monkeypatch.setenv("UNISONO_REPLICAS", "1000000")
    calls = {
        "parallel": lambda: unisono.parallel(plain(), replicas=10**6),
        "Strategy": lambda: unisono.Strategy(replicas=10**6),
        "spawn": lambda: unisono.spawn(print, replicas=10**6),
        "variable": lambda: unisono.parallel(plain()),
        "gpus": lambda: unisono.parallel(plain(), gpus=10**15),
    }
    if entry == "gpus":
        found = r"this machine has \d+ GPU"
    with pytest.raises(unisono.errors.DeviceError, match=found):
        calls[entry]()


def test_one_warning_of_replicas_that_share_cores(monkeypatch):
    choice = sys.modules["unisono.devices.choice"]
    monkeypatch.setattr(choice, "num_cores", lambda: 1)
    monkeypatch.setattr(choice, "_has_warned", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            unisono.parallel(plain(), replicas=2)
    told = [str(each.message) for each in caught if "take turns" in str(each.message)]
    assert told == ["2 CPU replicas share 1 core, and take turns on them: no speed-up."]
    assert [each.filename for each in caught if "take turns" in str(each.message)] == [__file__]


@pytest.mark.parametrize(
    "request_",
    [
        {"replicas": 0},
        {"replicas": -2},
        {"replicas": 2.0},
        {"replicas": True},
        {"gpus": []},
        {"gpus": [0, 0]},
        {"gpus": [99]},
        {"gpus": "0"},
        {"replicas": 3, "gpus": [0, 1]},
    ],
    ids=str,
)
def test_a_request_that_cannot_be_met(model, request_, monkeypatch):
    monkeypatch.setenv("UNISONO_SIMULATED_GPUS", "2")
    before = state(model)
    with pytest.raises(unisono.errors.DeviceError) as caught:
        unisono.parallel(model, **request_)
    assert "Asked for" in str(caught.value)
    assert apart(before, state(model)) == 0
    untouched = plain()
    keys = set(vars(untouched))
    with pytest.raises(unisono.errors.DeviceError):
        unisono.parallel(untouched, **request_)
    assert set(vars(untouched)) == keys


def test_a_refused_request_leaves_the_placement(model):
    with pytest.raises(unisono.errors.DeviceError):
        unisono.parallel(model, replicas=0)
    assert_unharmed(model)


# -- data that do not fit ----------------------------------------------------------------------


def call_with(model, call, x, y):
    return getattr(model, call)(*((x,) if call == "predict" else (x, y)), batch_size=8, verbose=0)


@pytest.mark.parametrize("call", CALLS_WITH_STEPS)
def test_inputs_of_the_wrong_shape(model, call):
    x, y = rows()
    with pytest.raises(Exception, match="incompatible"):
        call_with(model, call, x[:, :3], y)
    if BACKEND == "tensorflow" and call == "fit":
        # As on plain Keras: the step is counted, and nothing else.
        assert apart(trained(1)[:4], model.get_weights()) <= TOLERANCE
        assert int(model.optimizer.iterations) in (3, 4)
        model.optimizer.iterations.assign(3)
    assert_unharmed(model)


@pytest.mark.parametrize("data", [(), (None,), ("rows",)], ids=["nothing", "None", "text"])
def test_what_is_no_data_fails_as_on_plain_keras(data):
    errors = []
    for one in (plain(), adopted()):
        with pytest.raises(Exception, match=r"(?s).*") as caught:
            one.fit(*data, verbose=0)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_more_inputs_than_targets(model, call):
    x, y = rows()
    with pytest.raises(ValueError, match="cardinality"):
        getattr(model, call)(x, y[:5], verbose=0)
    assert_unharmed(model)


@pytest.mark.parametrize("call", CALLS)
def test_no_rows_at_all(call):
    x, y = rows(0)
    outcomes, steps = [], []
    for one in (plain(), adopted()):
        try:
            call_with(one, call, x, y)
            outcomes.append(None)
        except Exception as error:
            outcomes.append(type(error))
        steps.append(int(one.optimizer.iterations))
    assert outcomes[0] == outcomes[1]
    assert steps[1] == 0  # Plain Keras on TensorFlow counts one in `fit`.
    fit(one, *rows())
    assert apart(trained(1), state(one)) <= TOLERANCE


def test_data_that_is_not_a_number(model):
    x, y = rows()
    bad = x.copy()
    bad[20] = np.nan
    expected = plain()
    fit(expected, x, y)
    stop = keras.callbacks.TerminateOnNaN
    histories = [fit(one, bad, y, epochs=3, callbacks=[stop()]) for one in (expected, model)]
    assert len(histories[1]["loss"]) == len(histories[0]["loss"])
    for a, b in zip(state(expected), state(model), strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE)
    assert np.isnan(model.get_weights()[0]).all()
    model.set_weights(trained(1)[:4])
    model.compile(sgd(), "mse")  # The momentum is lost too.
    assert np.isfinite(fit(model, x, y)["loss"]).all()


# -- errors on the way -------------------------------------------------------------------------


class Fragile(keras.layers.Layer):
    """Fails when it is told to."""

    fails = False

    def call(self, x):
        if type(self).fails:
            raise ArithmeticError("the layer has failed")
        return x


@pytest.mark.parametrize("call", CALLS_WITH_STEPS)
def test_a_layer_raises(call, monkeypatch):
    x, y = rows()
    model = plain(lambda: keras.Sequential([keras.Input((4,)), Fragile(), keras.layers.Dense(1)]))
    unisono.parallel(model, replicas=2)
    monkeypatch.setattr(Fragile, "fails", True)
    before = model.get_weights()
    with pytest.raises((ArithmeticError, RuntimeError), match="the layer has failed"):
        call_with(model, call, x, y)
    assert apart(before, model.get_weights()) == 0
    monkeypatch.setattr(Fragile, "fails", False)
    fit(model, x, y)
    assert np.isfinite(model.predict(x, verbose=0)).all()


def of_tokens():
    parts = [keras.layers.Embedding(5, 4), keras.layers.BatchNormalization()]
    parts += [keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((1,), dtype="int32"), *parts])


class Counting(keras.Model):
    """Counts its steps in a variable, which may be one of TensorFlow's own."""

    def __init__(self, count, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if count is not None:
            self.count = count

    def train_step(self, data):
        (COUNTS[0] if COUNTS else self.count).assign_add(1.0)
        return super().train_step(data)


COUNTS = []
"""What no attribute of a model leads to."""


@pytest.mark.skipif(BACKEND != "tensorflow", reason="its replicas share a process")
def test_a_step_that_writes_to_what_replicas_share():
    import tensorflow as tf

    def counting(count):
        net = plain()
        model = Counting(count, net.inputs, net.outputs)
        model.compile(sgd(), "mse")
        return unisono.parallel(model, replicas=2)

    COUNTS.append(tf.Variable(0.0))
    try:
        with pytest.raises(unisono.ModelError, match=r"writes to the tf\.Variable .* keras\.Var"):
            fit(counting(None), *rows())
    finally:
        COUNTS.clear()
    for count in (tf.Variable(0.0), keras.Variable(0.0, trainable=False)):
        model = counting(count)
        fit(model, *rows())
        assert float(model.count) == float(model.optimizer.iterations) > 0


@pytest.mark.skipif(BACKEND == "jax", reason="JAX has no errors inside a compiled step")
@pytest.mark.parametrize("call", ["fit"] if BACKEND == "torch" else CALLS)
def test_an_operation_fails_on_one_replica_only(call):
    tokens = (np.arange(16) % 5).reshape(16, 1)
    bad = tokens.copy()
    bad[7] = 99  # In the share of the second replica.
    y = np.ones((16, 1), "float32")
    expected, model = plain(of_tokens), adopted(of_tokens)
    fit(expected, tokens, y, epochs=2)
    fit(model, tokens, y)
    before = model.get_weights()
    with pytest.raises(Exception, match=r"(?i)index|indices"):
        call_with(model, call, bad, y)
    assert apart(before, model.get_weights()) == 0
    fit(model, tokens, y)
    assert apart(expected.get_weights(), model.get_weights()) <= TOLERANCE


class Broken(Exception):
    """A user's own exception."""


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_a_generator_raises_in_the_middle_of_an_epoch(steps_per_execution):
    if steps_per_execution > 1 and BACKEND == "torch":
        pytest.skip("Keras has no steps_per_execution on torch")
    x, y = rows()

    def generate():
        for start in (0, 8, 16):
            yield x[start : start + 8], y[start : start + 8]
        raise Broken("no more data")

    model = adopted(steps_per_execution=steps_per_execution)
    with pytest.raises(Exception, match="no more data") as caught:
        model.fit(generate(), steps_per_epoch=5, verbose=0)
    assert caught.type is Broken or BACKEND == "tensorflow"
    done = int(model.optimizer.iterations)
    if BACKEND == "tensorflow" and steps_per_execution == 2:
        # TensorFlow cuts off what an execution has under way when its data fails.
        assert done >= 2
        assert all(np.isfinite(value).all() for value in model.get_weights())
        model.fit(x, y, verbose=0)
        return
    assert done == 3
    assert_unharmed(model)


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt, SystemExit])
def test_a_callback_raises_in_the_middle_of_an_epoch(error):
    x, y = rows()

    def stop(batch, logs):
        if batch == 1:
            raise error("enough")

    model = adopted()
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    with pytest.raises(error, match="enough"):
        fit(model, x, y, epochs=2, callbacks=[callback])
    assert int(model.optimizer.iterations) == 2
    fit(model, x[16:], y[16:])
    assert_unharmed(model)


# -- batches that are too small or do not divide -----------------------------------------------


def test_a_global_batch_smaller_than_the_replicas():
    x, y = rows(5)
    expected = plain()
    fit(expected, x, y, batch_size=1)
    model = adopted()
    with pytest.warns(UserWarning, match="smaller than the 2 replicas, so replicas idle"):
        fit(model, x, y, batch_size=1)
    assert apart(expected, model) <= TOLERANCE


def test_a_global_batch_that_never_divides():
    x, y = rows(14)
    expected = plain()
    fit(expected, x, y, batch_size=7)
    model = adopted()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, x, y, batch_size=7)
        fit(model, x, y, batch_size=7)
    ours = [str(one.message) for one in caught if "global batch" in str(one.message)]
    assert len(ours) == (1 if BACKEND == "jax" else 0)
    assert all("Use batch_size=8." in message for message in ours)
    fit(expected, x, y, batch_size=7)
    assert apart(expected, model) <= TOLERANCE


# -- devices that were fixed before ------------------------------------------------------------

TOO_LATE = """
import {first}
import keras, numpy as np
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
import unisono
before = model.get_weights()
try:
    unisono.parallel(model, replicas=3)
except unisono.errors.StartedError as error:
    print("refused:", error)
assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))
unisono.parallel(model, replicas={fewer})
model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=4, verbose=0)
print("trained")
"""


def _refusal(program, **changes):
    done = run("-c", program, **changes)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "trained"
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("refused: ")]
    return line


@pytest.mark.skipif(BACKEND != "tensorflow", reason="the devices of TensorFlow")
def test_tensorflow_has_started_with_too_few_devices():
    line = _refusal(TOO_LATE.format(first="tensorflow", fewer=1))
    assert "Asked for 3 CPU replicas; TensorFlow has started with 1 CPU device(s)" in line
    assert "Move `import unisono` above" in line


@pytest.mark.skipif(BACKEND != "jax", reason="the devices of JAX")
def test_the_program_has_fixed_the_number_of_jax_devices():
    first = "jax; jax.config.update('jax_num_cpu_devices', 2)"
    line = _refusal(TOO_LATE.format(first=first, fewer=2))
    assert "this program set jax_num_cpu_devices to 2" in line
    assert "Set it to 3 or more" in line


@pytest.mark.skipif(BACKEND != "jax", reason="the devices of JAX")
def test_the_environment_has_fixed_the_number_of_jax_devices():
    flags = "--xla_force_host_platform_device_count=2"
    line = _refusal(TOO_LATE.format(first="jax", fewer=2), XLA_FLAGS=flags)
    assert "XLA_FLAGS fixes JAX to 2 CPU device(s)" in line
