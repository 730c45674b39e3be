"""One line at the first `fit` says what happens; no more is said."""

import keras
import numpy as np
import pytest
from twins import BACKEND, adopted, rows

import unisono


def said(capsys, model, *args, **kwargs):
    """What `fit` prints; no step is done unless `epochs` says so."""
    capsys.readouterr()
    model.fit(*args, **{"verbose": 0, "epochs": 0, **kwargs})
    return capsys.readouterr().out.splitlines()


def test_one_line_at_the_first_fit(capsys):
    x, y = rows()
    model = adopted()
    expected = f"unisono: {BACKEND}, 2 replicas on cpu 0, 1; global batch 8 = 2 x 4 per replica"
    assert said(capsys, model, x, y, batch_size=8, epochs=2) == [expected]
    assert said(capsys, model, x, y, batch_size=4, epochs=1) == []


def test_nothing_is_said_before_fit(capsys):
    x, y = rows()
    model = adopted()
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    model.train_on_batch(x, y)
    assert capsys.readouterr().out == ""
    assert len(said(capsys, model, x, y)) == 1


def test_one_replica(capsys):
    x, y = rows()
    expected = f"unisono: {BACKEND}, 1 replica on cpu; global batch 8 = 1 x 8 per replica"
    assert said(capsys, adopted(replicas=1), x, y, batch_size=8) == [expected]


@pytest.mark.parametrize(
    ("options", "batch"),
    [
        ({}, "24 = 2 x 12"),
        ({"batch_size": 100}, "24 = 2 x 12"),
        ({"batch_size": 10}, "10 = 2 x 5"),
        ({"steps_per_epoch": 3}, "8 = 2 x 4"),
    ],
)
def test_the_global_batch_is_the_one_that_fit_uses(capsys, options, batch):
    (line,) = said(capsys, adopted(), *rows(), **options)
    assert line.endswith(f"; global batch {batch} per replica")


def test_a_batch_that_does_not_divide(capsys):
    (line,) = said(capsys, adopted(), *rows(), batch_size=7)
    assert line.endswith("; global batch 7, about 3.5 per replica")


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return rows(8)


def generator():
    while True:
        yield rows(8)


@pytest.mark.parametrize("data", [Rows, generator])
def test_data_that_alone_knows_its_batches(capsys, data):
    (line,) = said(capsys, adopted(), data(), steps_per_epoch=2)
    assert line.endswith("; global batch as the data yields it, 1/2 of it per replica")


def test_tf_data(capsys):
    tf = pytest.importorskip("tensorflow")
    data = tf.data.Dataset.from_tensor_slices(rows(16))
    (line,) = said(capsys, adopted(), data.batch(8, drop_remainder=True))
    assert line.endswith("; global batch 8 = 2 x 4 per replica")
    (line,) = said(capsys, adopted(), data.batch(8))
    assert line.endswith("; global batch as the data yields it, 1/2 of it per replica")


@pytest.mark.skipif(BACKEND != "torch", reason="importing a second framework takes seconds")
def test_a_torch_data_loader(capsys):
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(*map(torch.from_numpy, rows(16)))
    (line,) = said(capsys, adopted(), torch.utils.data.DataLoader(data, batch_size=8))
    assert line.endswith("; global batch 8 = 2 x 4 per replica")


def test_dict_inputs(capsys):
    x, y = rows()
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((4,), name="b")}
    outputs = keras.layers.Dense(1)(inputs["a"] + inputs["b"])
    model = unisono.parallel(keras.Model(inputs, outputs), replicas=2)
    model.compile("sgd", "mse")
    (line,) = said(capsys, model, {"a": x, "b": x}, y, batch_size=8)
    assert "global batch 8 = 2 x 4" in line


def test_simulated_gpus_are_named_as_such(capsys, monkeypatch):
    monkeypatch.setenv("UNISONO_SIMULATED_GPUS", "2")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    unisono.parallel(model, gpus=[1])
    model.compile("sgd", "mse")
    (line,) = said(capsys, model, np.ones((4, 4)), np.ones((4, 1)), epochs=1)
    assert "1 replica on gpu 1 (simulated on the cpu); global batch 4 = 1 x 4" in line
