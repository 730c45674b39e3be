"""Models that are made under a scope train on the replicas, exactly as with `parallel`."""

import keras
import pytest
from twins import TOLERANCE, adopted, apart, fit, mlp, plain, rows, state, trained

import unisono
from unisono.compat import MirroredStrategy
from unisono.parallel import is_parallel


def test_a_model_compiled_in_the_scope_agrees_with_one_device():
    strategy = unisono.Strategy(replicas=3)
    assert strategy.num_replicas_in_sync == 3
    with strategy.scope():
        model = plain()
    assert is_parallel(model)
    fit(model, *rows(), epochs=2)
    assert apart(trained(2), state(model)) <= TOLERANCE


def test_a_model_may_train_before_the_scope_ends(capsys):
    with unisono.Strategy(replicas=2).scope():
        model = plain()
        fit(model, *rows(), epochs=1)
        assert "2 replicas" in capsys.readouterr().out
    assert apart(trained(1), state(model)) <= TOLERANCE


def test_a_model_compiled_after_the_scope():
    with unisono.Strategy(replicas=2).scope():
        keras.utils.set_random_seed(7)
        model = mlp()
    assert is_parallel(model)


def test_only_the_outermost_model_is_adopted():
    before = mlp()
    with unisono.Strategy(replicas=2).scope():
        inner = mlp()
        outer = keras.Sequential([keras.Input((4,)), inner])
    assert is_parallel(outer)
    assert not is_parallel(inner)
    assert not is_parallel(before)


def test_a_model_that_is_parallel_already_stays_as_it_is():
    with unisono.Strategy(replicas=3).scope():
        model = adopted(replicas=2)
    assert vars(model)["_unisono"].placement.num_replicas == 2


def test_the_scope_leaves_keras_as_it_was():
    compile_before = keras.Model.compile

    def fail_in_scope():
        with unisono.Strategy(replicas=2).scope():
            assert keras.Model.compile is not compile_before
            raise LookupError

    with pytest.raises(LookupError):
        fail_in_scope()
    assert keras.Model.compile is compile_before
    model = plain()
    assert not is_parallel(model)


def test_scopes_inside_each_other():
    outer, inner = unisono.Strategy(replicas=2), unisono.Strategy(replicas=3)
    compile_before = keras.Model.compile
    with outer.scope():
        with inner.scope():
            first = plain()
        second = plain()
    counts = [vars(model)["_unisono"].placement.num_replicas for model in (first, second)]
    assert counts == [3, 2]
    assert keras.Model.compile is compile_before


def test_statistics_per_replica():
    with unisono.Strategy(replicas=2, sync_batch_norm=False).scope():
        model = plain()
    assert vars(model)["_unisono"].sync_batch_norm is False


# -- under the name of TensorFlow -----------------------------------------------------------------


@pytest.mark.parametrize(
    "devices",
    [
        ["GPU:0", "GPU:1"],
        ["/gpu:0", "/gpu:1"],
        ("/job:localhost/replica:0/task:0/device:GPU:0", "/device:GPU:1"),
        ["CPU:0", "CPU:1"],
    ],
)
def test_mirrored_strategy_takes_names_of_devices(devices, monkeypatch):
    monkeypatch.setenv("UNISONO_SIMULATED_GPUS", "2")
    assert MirroredStrategy(devices=devices).num_replicas_in_sync == 2


def test_mirrored_strategy_takes_every_gpu(monkeypatch):
    monkeypatch.setenv("UNISONO_SIMULATED_GPUS", "3")
    strategy = MirroredStrategy()
    assert strategy.num_replicas_in_sync == 3
    with strategy.scope():
        model = plain()
    fit(model, *rows(), epochs=1)
    assert apart(trained(1), state(model)) <= TOLERANCE


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], "Give a list of names"),
        ("GPU:0", "Give a list of names"),
        (["TPU:0"], "not device names such as"),
        (["GPU:0", "CPU:0"], "Choose one kind"),
        (["GPU:0", "GPU:0"], "repeats an id"),
        (["GPU:7"], r"this machine has \[0, 1\]"),
        (["CPU:3"], "from CPU:0 upwards"),
    ],
)
def test_devices_that_make_no_sense(devices, message, monkeypatch):
    monkeypatch.setenv("UNISONO_SIMULATED_GPUS", "2")
    with pytest.raises(unisono.errors.DeviceError, match=message):
        MirroredStrategy(devices)


def test_replicas_that_make_no_sense():
    with pytest.raises(unisono.errors.DeviceError, match="replicas=0"):
        unisono.Strategy(replicas=0)
