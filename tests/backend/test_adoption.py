"""`parallel` adopts the model that it is given: the same object, the same class, plain Keras."""

import copy
import inspect
import pickle

import keras
import numpy as np
import pytest
from twins import (
    BACKEND,
    TOLERANCE,
    adopted,
    apart,
    fit,
    mlp,
    plain,
    rows,
    sgd,
    state,
    trained,
    twins,
)

import unisono


@keras.saving.register_keras_serializable("tests")
class Net(keras.Model):
    """A subclassed model that its first call builds."""

    def __init__(self, width=5, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        self.hidden = keras.layers.Dense(width, activation="tanh")
        self.out = keras.layers.Dense(1)

    def call(self, x):
        return self.out(self.hidden(x))

    def get_config(self):
        return {**super().get_config(), "width": self.width}


class Watch(keras.callbacks.Callback):
    """Holds a layer itself and reads its weights at each event."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen += self.layer.get_weights()

    def on_epoch_end(self, epoch, logs=None):
        self.seen += self.layer.get_weights()


class Clip(keras.callbacks.Callback):
    """Holds a layer itself and writes its weights at each batch."""

    def __init__(self, layer, limit=0.3):
        super().__init__()
        self.layer = layer
        self.limit = limit

    def on_train_batch_end(self, batch, logs=None):
        limit = self.limit
        self.layer.set_weights([np.clip(w, -limit, limit) for w in self.layer.get_weights()])


class ClipThroughModel(Clip):
    """The same by way of `self.model`, which plain Keras supports on JAX too."""

    def on_train_batch_end(self, batch, logs=None):
        self.layer = self.model.layers[0]
        super().on_train_batch_end(batch, logs)


# -- what comes back ---------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_same_object_of_the_same_class_comes_back(replicas):
    model = mlp()
    layers, weights = list(model.layers), state(model)
    assert unisono.parallel(model, replicas=replicas) is model
    assert type(model) is keras.Sequential
    assert isinstance(model, keras.Model)
    assert all(a is b for a, b in zip(model.layers, layers, strict=True))
    assert apart(weights, state(model)) == 0


def test_a_second_call_changes_nothing(capsys):
    x, y = rows()
    model = adopted()
    fit(model, x, y)
    before, weights = dict(vars(model)), state(model)
    assert unisono.parallel(model, replicas=2) is model
    after = vars(model)
    assert before.keys() == after.keys()
    assert all(after[name] is value for name, value in before.items())
    assert apart(weights, state(model)) == 0
    capsys.readouterr()
    fit(model, x, y)
    assert "unisono" not in capsys.readouterr().out


def test_another_count_places_the_model_again():
    x, y = rows()
    model = adopted()
    fit(model, x, y)
    for replicas in (3, 1):
        assert unisono.parallel(model, replicas=replicas) is model
        fit(model, x, y)
    assert apart(trained(3), state(model)) <= TOLERANCE
    assert model.predict(x, verbose=0).shape == (24, 1)


def test_release_gives_plain_keras_back():
    x, y = rows()
    model = adopted()
    fit(model, x, y)
    assert unisono.release(model) is model
    assert not [part for part in (model, *model.layers, model.optimizer) if _hooks_on(part)]
    assert not [name for name in vars(model) if "unisono" in name]
    fit(model, x, y)
    assert apart(trained(2), state(model)) <= TOLERANCE
    # And back again.
    unisono.parallel(model, replicas=2)
    fit(model, x, y)
    assert apart(trained(3), state(model)) <= TOLERANCE


def _hooks_on(part):
    return [name for name, value in vars(part).items() if hasattr(value, "is_unisono_hook")]


def test_release_of_a_plain_model_is_harmless():
    model = plain()
    before = dict(vars(model))
    assert unisono.release(model) is model
    assert dict(vars(model)) == before


# -- what it keeps -----------------------------------------------------------------------------


def test_a_compiled_model_keeps_its_optimizer_and_the_optimizers_state():
    x, y = rows()
    adam = {"optimizer": lambda: keras.optimizers.Adam(0.01)}
    expected, model = plain(**adam), plain(**adam)
    fit(expected, x, y, epochs=3)
    fit(model, x, y)
    optimizer, before = model.optimizer, state(model)
    unisono.parallel(model, replicas=2)
    assert model.optimizer is optimizer
    assert apart(before, state(model)) == 0
    assert int(model.optimizer.iterations) == 3
    fit(model, x, y, epochs=2)
    assert int(model.optimizer.iterations) == 9
    assert apart(expected, model) <= TOLERANCE


def test_compiling_again_starts_a_new_optimizer():
    x, y = rows()
    expected, model = twins()
    for one in (expected, model):
        fit(one, x, y)
        one.compile(keras.optimizers.Adam(0.02), "mae", metrics=["mse"])
    assert apart(fit(expected, x, y), fit(model, x, y)) <= TOLERANCE
    assert apart(expected, model) <= TOLERANCE


def test_a_frozen_layer_is_thawed_later():
    x, y = rows()
    results = []
    for is_parallel in (False, True):
        model = plain()
        model.layers[0].trainable = False
        if is_parallel:
            unisono.parallel(model, replicas=2)
        for is_trainable in (False, True):
            model.layers[0].trainable = is_trainable
            model.compile(sgd(), "mse")
            fit(model, x, y)
        results.append(state(model))
    assert apart(*results) <= TOLERANCE


@pytest.mark.parametrize("first", ["fit", "predict", "evaluate"])
def test_a_subclassed_model_is_built_by_its_first_call(first):
    x, y = rows(23)
    expected, model = twins(Net)
    for one in (expected, model):
        keras.utils.set_random_seed(3)
        if first == "predict":
            one.predict(x, batch_size=8, verbose=0)
        elif first == "evaluate":
            one.evaluate(x, y, batch_size=8, verbose=0)
        fit(one, x, y, epochs=2)
    assert type(model) is Net
    assert apart(expected, model) <= TOLERANCE


def test_weights_layers_and_summary_are_those_of_a_keras_model():
    x, y = rows()
    expected, model = twins()
    fit(expected, x, y)
    fit(model, x, y)
    lines = {id(one): [] for one in (expected, model)}
    for one in (expected, model):
        one.summary(print_fn=lambda line, one=one: lines[id(one)].append(line))
    name = model.name, expected.name
    assert [t.replace(name[0], name[1]) for t in lines[id(model)]] == lines[id(expected)]
    assert [layer.name for layer in model.layers] == ["hidden", "out"]
    assert model.count_params() == expected.count_params()
    model.set_weights([np.zeros_like(w) for w in model.get_weights()])
    assert not model.predict(x, verbose=0).any()
    assert not model.layers[0].get_weights()[0].any()
    model.set_weights(expected.get_weights())
    fit(expected, x, y)
    fit(model, x, y)
    assert apart(expected, model) <= TOLERANCE


def test_one_batch_at_a_time():
    x, y = rows()
    expected, model = twins(metrics=["mae"])
    for start in (0, 8, 16, 23):
        batch = x[start : start + 8], y[start : start + 8]
        assert apart(expected.train_on_batch(*batch), model.train_on_batch(*batch)) <= TOLERANCE
        assert apart(expected.test_on_batch(*batch), model.test_on_batch(*batch)) <= TOLERANCE
        outputs = [one.predict_on_batch(x[: start + 1]) for one in (expected, model)]
        assert apart(outputs[:1], outputs[1:]) <= TOLERANCE
    assert apart(expected, model) <= TOLERANCE


def test_eager_calls_between_training_calls():
    x, y = rows()
    model = adopted()
    outputs = []
    for _ in range(2):
        outputs.append(keras.ops.convert_to_numpy(model(x[:5])))
        assert apart([outputs[-1]], [model.predict(x[:5], verbose=0)]) <= TOLERANCE
        fit(model, x, y)
    hidden = keras.ops.convert_to_numpy(model.layers[0](x[:5]))
    assert hidden.shape == (5, 5)
    assert np.max(np.abs(outputs[0] - outputs[1])) > 1e-3


# -- references that the user holds ------------------------------------------------------------


def test_references_show_the_trained_values():
    x, y = rows()
    model = plain()
    layer, kernel, weights = model.layers[0], model.layers[0].kernel, model.weights
    unisono.parallel(model, replicas=2)
    fit(model, x, y)
    expected = trained(1)
    assert apart(expected[:2], layer.get_weights()) <= TOLERANCE
    assert layer.kernel is kernel
    assert all(a is b for a, b in zip(model.weights, weights, strict=True))
    assert apart(expected[:1], [keras.ops.convert_to_numpy(kernel)]) <= TOLERANCE


def test_a_callback_reads_a_layer_that_it_holds():
    x, y = rows()
    expected, model = plain(), plain()
    seen, watch = [], Watch(model.layers[0])
    unisono.parallel(model, replicas=2)
    for start in [0, 8, 16, 0, 8, 16]:
        expected.train_on_batch(x[start : start + 8], y[start : start + 8])
        seen += expected.layers[0].get_weights() * (2 if start == 16 else 1)
    fit(model, x, y, epochs=2, callbacks=[watch])
    assert apart(seen, watch.seen) <= TOLERANCE


@pytest.mark.parametrize("others", [[], [keras.callbacks.LambdaCallback]])
def test_a_callback_writes_a_layer_that_it_holds(others):
    x, y = rows()
    expected, model = twins()
    fit(expected, x, y, epochs=2, callbacks=[ClipThroughModel(None)])
    # A second callback that asks for its model: nothing written may be lost by that.
    others = [one(on_train_batch_end=lambda batch, logs: None) for one in others]
    for other in others:
        other.on_train_batch_end = lambda batch, logs, other=other: other.model.get_weights()
    fit(model, x, y, epochs=2, callbacks=[Clip(model.layers[0]), *others])
    assert apart(expected, model) <= TOLERANCE


def test_a_callback_uses_the_model_in_the_middle_of_an_epoch():
    x, y = rows()
    expected, model = twins()
    seen = {id(one): [] for one in (expected, model)}

    class Peek(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            found = seen[id(self._model)]
            found.append(self.model.predict(x[:5], verbose=0))
            found.append(self.model.evaluate(x[:7], y[:7], verbose=0))

    for one in (expected, model):
        fit(one, x, y, callbacks=[Peek()])
    assert apart(seen[id(expected)], seen[id(model)]) <= TOLERANCE
    assert apart(expected, model) <= TOLERANCE


# -- copies and files --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("copied", "build"),
    [(copy.deepcopy, mlp), (lambda model: pickle.loads(pickle.dumps(model)), Net)],
)
def test_a_copy_is_a_plain_model_that_trains_on(copied, build):
    x, y = rows()
    model = adopted(build)
    fit(model, x, y)
    twin = copied(model)
    assert type(twin) is type(model)
    assert not _hooks_on(twin)
    assert apart(model, twin) == 0
    fit(twin, x, y)
    assert apart(trained(2, build), state(twin)) <= TOLERANCE


def test_a_clone_is_a_plain_model_with_weights_of_its_own():
    model = adopted()
    fit(model, *rows())
    clone = keras.models.clone_model(model)
    assert type(clone) is type(model)
    assert not _hooks_on(clone)
    clone.set_weights(plain().get_weights())
    clone.compile(sgd(), "mse")
    fit(clone, *rows())
    assert apart(trained(1), state(clone)) <= TOLERANCE
    assert apart(trained(1), state(model)) <= TOLERANCE


def test_export_works_as_far_as_it_does_for_plain_keras(tmp_path):
    x, y = rows()
    try:
        plain().export(str(tmp_path / "plain"), verbose=False)
    except Exception as error:
        pytest.skip(f"plain Keras does not export on {BACKEND}: {type(error).__name__}")
    model = adopted()
    fit(model, x, y)
    model.export(str(tmp_path / "parallel"), verbose=False)
    served = pytest.importorskip("tensorflow").saved_model.load(str(tmp_path / "parallel"))
    assert apart([model.predict(x, verbose=0)], [served.serve(x).numpy()]) <= TOLERANCE
    fit(model, x, y)
    assert apart(trained(2), state(model)) <= TOLERANCE


def test_another_compile_replaces_loss_and_metrics_of_the_same_shapes():
    """Also where the step that was compiled before would fit the new state."""
    x, y = rows()
    found = []
    for model in (plain(metrics=["mse"]), adopted(metrics=["mse"])):
        fit(model, x, y)
        model.evaluate(x, y, verbose=0)
        model.compile(sgd(), "mae", metrics=["mae"])
        history = fit(model, x, y)
        found.append([history, model.evaluate(x, y, verbose=0, return_dict=True), state(model)])
    (history, logs, weights), (own_history, own_logs, own_weights) = found
    assert history.keys() == own_history.keys() == {"loss", "mae"}
    assert apart(list(logs.values()), list(own_logs.values())) <= TOLERANCE
    assert apart(list(history.values()), list(own_history.values())) <= TOLERANCE
    assert apart(weights, own_weights) <= TOLERANCE


def test_calls_keep_their_names_and_signatures():
    model, parallel = twins()
    for name in ("fit", "save", "save_weights", "export"):
        ours, keras_own = getattr(parallel, name), getattr(model, name)
        assert ours.__name__ == name
        assert inspect.signature(ours) == inspect.signature(keras_own)
