"""What callbacks see and do while several replicas train.

That each of Keras' own callbacks leaves the same results as on one device is part of the
exactness contract; here is what a comparison of results does not show.
"""

from collections import Counter

import keras
import numpy as np
import pytest
from keras import callbacks
from twins import BACKEND, TOLERANCE, adopted, apart, fit, plain, rows, state, trained, twins

import unisono.callbacks
from exactness.cases import callbacks as contract

# Named by the cases of the contract, or here.
_LEFT_OUT = {
    "Callback": "the base class",
    "CallbackList": "the container that fit makes",
    "History": "what fit returns: every test uses it",
    "ProgbarLogger": "fit adds it: see test_progress_is_shown_once",
    "RemoteMonitor": "sends the logs of an epoch, no more, to a server",
    "OrbaxCheckpoint": "see test_world_callbacks: saves the model's values, and no more",
    "TensorBoard": "see test_tensorboard_writes_one_file_for_training",
}


class Count(callbacks.Callback):
    """Counts every event."""

    def __init__(self):
        super().__init__()
        self.events = Counter()

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda *args, **kwargs: self.events.update([name])
        return super().__getattribute__(name)


def test_every_callback_of_keras_is_accounted_for():
    with open(contract.__file__) as file:
        text = file.read()
    public = {name for name in dir(callbacks) if not name.startswith("_")}
    unknown = {name for name in public - _LEFT_OUT.keys() if f"callbacks.{name}" not in text}
    assert not unknown


def test_an_attribute_named_steps_is_the_programs_own():
    class Counts(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1

    counts = Counts()
    fit(adopted(), np.ones((8, 4)), np.ones((8, 1)), batch_size=4, callbacks=[counts])
    assert counts.steps == 2


def test_the_public_names():
    assert unisono.callbacks.__all__ == ["DeviceStats", "chief_only", "every_rank"]


def test_each_event_happens_once():
    x, y = rows()
    model, count = adopted(), Count()
    fit(model, x, y, epochs=2, validation_data=(x[:9], y[:9]), callbacks=[count])
    model.evaluate(x, y, batch_size=8, callbacks=[count], verbose=0)
    model.predict(x, batch_size=8, callbacks=[count], verbose=0)
    each = {"train": (1, 6), "test": (3, 7), "predict": (1, 3)}
    for phase, (calls, batches) in each.items():
        assert count.events[f"on_{phase}_begin"] == count.events[f"on_{phase}_end"] == calls
        assert count.events[f"on_{phase}_batch_begin"] == batches
        assert count.events[f"on_{phase}_batch_end"] == batches
    assert count.events["on_epoch_begin"] == count.events["on_epoch_end"] == 2


def test_progress_is_shown_once(capsys):
    x, y = rows()
    model = adopted()
    model.fit(x, y, batch_size=8, epochs=2, verbose=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("Epoch")] == ["Epoch 1/2", "Epoch 2/2"]
    assert sum("3/3" in line for line in lines) == 2


def test_numbers_are_read_and_written_in_every_usual_way():
    x, y = rows()
    seen = {}

    class Tinker(callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            optimizer = self.model.optimizer
            rate = optimizer.learning_rate
            read = [float(rate), float(rate.numpy()), float(np.asarray(rate)), float(rate.value)]
            read += [int(optimizer.iterations), float(keras.ops.convert_to_numpy(rate))]
            seen.setdefault(id(self.model), []).append(read)
            match batch:
                case 0:
                    optimizer.learning_rate = 0.05
                case 1:
                    optimizer.learning_rate.assign(0.9 * rate)
                case 2:
                    keras.ops.multiply(rate, 2.0)
                    self.model.layers[1].bias.assign_add([0.1])

    expected, model = twins()
    for one in (expected, model):
        fit(one, x, y, epochs=2, callbacks=[Tinker()])
    assert apart(seen[id(expected)], seen[id(model)]) <= TOLERANCE
    assert apart(expected, model) <= TOLERANCE


def test_stop_training_ends_the_epoch_at_that_batch():
    model, count = adopted(), Count()
    stop = callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(model, "stop_training", batch == 1)
    )
    fit(model, *rows(), epochs=3, callbacks=[stop, count])
    assert count.events["on_train_batch_end"] == 2
    assert int(model.optimizer.iterations) == 2


def test_a_file_written_in_the_middle_of_an_epoch_has_the_values_of_that_batch(tmp_path):
    x, y = rows()
    model = adopted()
    save = callbacks.ModelCheckpoint(tmp_path / "at_{batch}.keras", save_freq=2)
    fit(model, x, y, epochs=2, callbacks=[save])
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"at_{i}.keras" for i in (1, 2, 3)]
    files = {i: keras.models.load_model(tmp_path / f"at_{i}.keras") for i in (2, 3)}
    assert int(files[2].optimizer.iterations) == 2
    fit(files[2], x[16:], y[16:])
    assert apart(trained(1), state(files[2])) <= TOLERANCE
    assert apart(trained(2), state(files[3])) <= TOLERANCE


def test_a_callback_freezes_a_layer():
    x, y = rows()
    if BACKEND == "jax":
        pytest.skip("plain Keras on JAX fails when a layer is frozen while fit runs")

    class Freeze(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                self.model.layers[0].trainable = False

    results = []
    for model in twins():
        fit(model, x, y, epochs=2, callbacks=[Freeze()])
        results.append(model.get_weights())
    assert apart(*results) <= TOLERANCE


def test_callbacks_of_evaluate_and_predict_see_layers_and_outputs():
    x, y = rows()
    results = []
    for model in (plain(), adopted()):
        seen = []
        layer = model.layers[0]
        look = callbacks.LambdaCallback()
        look.on_test_batch_end = lambda batch, logs, seen=seen: seen.append(logs["loss"])
        if hasattr(model, "_unisono"):  # Plain Keras on JAX fails here.
            look.on_test_batch_begin = lambda batch, logs, layer=layer: layer.get_weights()
        look.on_predict_batch_end = lambda batch, logs, seen=seen: seen.append(
            keras.ops.convert_to_numpy(logs["outputs"])
        )
        model.evaluate(x, y, batch_size=8, callbacks=[look], verbose=0)
        model.predict(x, batch_size=8, callbacks=[look], verbose=0)
        results.append(seen)
    assert apart(*results) <= TOLERANCE


def test_tensorboard_writes_one_file_for_training(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    model = adopted()
    fit(model, *rows(), epochs=2, callbacks=[callbacks.TensorBoard(tmp_path, histogram_freq=1)])
    assert len(list((tmp_path / "train").iterdir())) == 1
    assert apart(trained(2), state(model)) <= TOLERANCE


@pytest.mark.skipif(BACKEND != "jax", reason="only on JAX does a training call set state aside")
def test_a_callback_that_fails_to_evaluate_goes_on_training():
    x, y = rows()
    model = adopted()

    def evaluate(batch, logs):
        with pytest.raises(Exception, match=r".*"):
            model.evaluate(x[:, :2], y, verbose=0)

    fit(model, x, y, callbacks=[callbacks.LambdaCallback(on_train_batch_end=evaluate)])
    assert apart(trained(1), state(model)) <= TOLERANCE
