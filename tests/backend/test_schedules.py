"""Learning rate schedules: their values as numbers, as tensors, in a fit, and in a file."""

import keras
import numpy as np
import pytest
from keras import ops

from unisono import schedules
from unisono.errors import SettingError

STEPS = [0, 1, 5, 10, 37, 99, 100, 250]
RATES = {
    "decay": schedules.PolynomialDecay(0.1, 100),
    "decay to a rest": schedules.PolynomialDecay(0.1, 100, end_rate=0.01, power=2.0),
    "scaled": schedules.Scaled(schedules.PolynomialDecay(0.1, 100), 4),
    "warm-up of a rate": schedules.WarmUp(0.4, 10, start_factor=0.25),
    "no warm-up": schedules.WarmUp(schedules.PolynomialDecay(0.1, 100), 0),
    "all": schedules.for_replicas(schedules.PolynomialDecay(0.1, 100), 4, warmup_steps=10),
    "of keras": schedules.for_replicas(
        keras.optimizers.schedules.ExponentialDecay(0.1, 50, 0.5), 2, warmup_steps=5
    ),
}


def test_the_public_names():
    names = ["PolynomialDecay", "Scaled", "WarmUp", "for_replicas", "scaling_factor"]
    assert sorted(schedules.__all__) == names
    assert all(">>> " in getattr(schedules, name).__doc__ for name in names)


@pytest.mark.parametrize("name", RATES)
def test_numbers_arrays_and_tensors_agree(name):
    rate = RATES[name]
    numbers = [rate(step) for step in STEPS]
    assert all(isinstance(number, float) for number in numbers)
    tensors = [ops.convert_to_numpy(rate(ops.convert_to_tensor(step, "int32"))) for step in STEPS]
    np.testing.assert_allclose(numbers, tensors, rtol=1e-6, atol=1e-9)
    if name != "of keras":
        np.testing.assert_allclose(rate(np.array(STEPS)), numbers, rtol=1e-12)


def test_the_decay_is_a_straight_line_to_zero_that_stays_there():
    rate = schedules.PolynomialDecay(5e-3, 70 * 782)
    assert rate(0) == 5e-3
    assert rate(35 * 782) == pytest.approx(2.5e-3)
    assert rate(70 * 782) == rate(10**9) == 0.0


def test_the_decay_is_that_of_keras():
    ours = schedules.PolynomialDecay(0.1, 100, end_rate=0.01, power=2.0)
    theirs = keras.optimizers.schedules.PolynomialDecay(0.1, 100, 0.01, power=2.0)
    expected = [float(ops.convert_to_numpy(theirs(step))) for step in STEPS]
    np.testing.assert_allclose([ours(step) for step in STEPS], expected, rtol=1e-5)


def test_gradual_warm_up_begins_at_the_rate_of_one_replica():
    """Goyal et al. 2017: from η to kη by equal amounts at each step, then the schedule times k."""
    rate = schedules.for_replicas(0.1, 8, warmup_steps=100)
    values = np.array([rate(step) for step in range(101)])
    assert values[0] == pytest.approx(0.1)
    assert values[100] == rate(1000) == pytest.approx(0.8)
    np.testing.assert_allclose(np.diff(values), 0.7 / 100, rtol=1e-9)


def test_square_root_scaling():
    rate = schedules.for_replicas(0.1, 4, scaling="sqrt", warmup_steps=10)
    assert (rate(0), rate(10)) == (pytest.approx(0.1), pytest.approx(0.2))


@pytest.mark.parametrize(("num_replicas", "scaling"), [(1, "linear"), (8, "none")])
def test_what_is_not_scaled_is_not_warmed_up(num_replicas, scaling):
    plain = schedules.PolynomialDecay(0.1, 100)
    rate = schedules.for_replicas(plain, num_replicas, scaling=scaling, warmup_steps=10)
    assert [rate(step) for step in STEPS] == [plain(step) for step in STEPS]


@pytest.mark.parametrize("name", RATES)
def test_a_schedule_is_saved_with_its_optimizer(name):
    optimizer = keras.optimizers.SGD(RATES[name], momentum=0.9)
    config = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(config)
    copy = again.get_config()["learning_rate"]
    assert copy == optimizer.get_config()["learning_rate"]
    rate = keras.saving.deserialize_keras_object(copy)
    assert [rate(step) for step in STEPS] == [RATES[name](step) for step in STEPS]


def test_an_optimizer_follows_it_step_by_step():
    rate = schedules.for_replicas(
        schedules.PolynomialDecay(0.1, 8), 2, scaling="linear", warmup_steps=4
    )
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(rate), "mean_absolute_error")
    model.set_weights([np.array([[-100.0]])])
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(float(self.model.get_weights()[0][0, 0]))

    # The gradient is -1 at every step, so each step moves the weight by the rate.
    model.fit(np.ones((6, 1)), np.ones((6, 1)), batch_size=1, verbose=0, callbacks=[Watch()])
    moved = np.diff([-100.0, *seen])
    np.testing.assert_allclose(moved, [rate(step) for step in range(6)], atol=2e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: schedules.PolynomialDecay(-0.1, 10),
        lambda: schedules.PolynomialDecay(float("nan"), 10),
        lambda: schedules.PolynomialDecay(0.1, 0),
        lambda: schedules.PolynomialDecay(0.1, 10, power=0),
        lambda: schedules.Scaled("0.1", 2),
        lambda: schedules.Scaled(0.1, -1),
        lambda: schedules.WarmUp(0.1, -1),
        lambda: schedules.WarmUp(0.1, 10, start_factor=-1),
        lambda: schedules.scaling_factor(0),
        lambda: schedules.scaling_factor(2, "cubic"),
    ],
)
def test_what_makes_no_sense_is_refused(make):
    with pytest.raises(SettingError, match=r"^Asked for .*(Give|Choose among)"):
        make()
