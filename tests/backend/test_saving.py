"""Files of a parallel model are those of a plain one, and load where there is no unisono."""

import io
import json
import sys
import zipfile
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
from own_classes import Net, Shift, mixed, with_shift
from scripts import run
from twins import TOLERANCE, adopted, apart, fit, plain, rows, twins

import unisono

HERE = Path(__file__).parent


def named_net():
    return Net(name="net")


BUILDERS = {"registered": named_net, "shift": with_shift, "mixed": mixed}


def _targets(build, y):
    return {"left": y, "right": -y} if build is mixed else y


def _archive(model, path):
    model.save(path)
    with zipfile.ZipFile(path) as archive:
        metadata = json.loads(archive.read("metadata.json"))
        config = json.loads(archive.read("config.json"))
        with h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as file:
            arrays = {}
            file.visititems(lambda name, item: arrays.update(_array(name, item)))
    metadata.pop("date_saved")
    return config, metadata, arrays


def _array(name, item):
    return {name: np.asarray(item)} if isinstance(item, h5py.Dataset) else {}


@pytest.mark.parametrize("build", [named_net, mixed])
def test_an_archive_is_that_of_a_plain_model(build, tmp_path):
    x, y = rows()
    expected, model = twins(build, metrics=["mae"] if build is not mixed else None)
    saved = []
    for number, one in enumerate((expected, model)):
        fit(one, x, _targets(build, y))
        saved.append(_archive(one, tmp_path / f"{number}.keras"))
    assert saved[1][0] == saved[0][0]
    assert saved[1][1] == saved[0][1]
    assert apart(saved[0][2], saved[1][2]) <= TOLERANCE


def test_configurations_are_those_of_a_plain_model():
    expected, model = twins(mixed)
    assert model.to_json() == expected.to_json()
    assert model.get_config() == expected.get_config()
    assert model.get_compile_config() == expected.get_compile_config()
    assert model.optimizer.get_config() == expected.optimizer.get_config()
    for one, other in zip(model.layers, expected.layers, strict=True):
        assert one.get_config() == other.get_config()


def test_files_load_where_there_is_no_unisono(tmp_path):
    x, y = rows()
    expected = {}
    for name, build in BUILDERS.items():
        reference = plain(build)
        fit(reference, x, _targets(build, y), epochs=2)
        expected[name] = reference.get_weights()
        model = adopted(build)
        fit(model, x, _targets(build, y), callbacks=_saves(tmp_path, name))
    (tmp_path / "net.json").write_text(model.to_json())
    model.save_weights(tmp_path / "net.weights.h5")
    expected["json"] = model.get_weights()
    # A file of the middle of `fit`: two of three batches are done, and three more follow.
    reference = plain(with_shift)
    fit(reference, x[:16], y[:16])
    fit(reference, x, y)
    expected["shift_2"] = reference.get_weights()
    done = run(str(HERE / "load_without_unisono.py"), str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == expected.keys()
    for name, weights in expected.items():
        assert apart(weights, found[name]) <= TOLERANCE, name


def _saves(folder, name):
    """Save at the end, and for one of the models in the middle of an epoch too."""
    at_end = keras.callbacks.ModelCheckpoint(folder / f"{name}.keras")
    if name != "shift":
        return [at_end]
    return [at_end, keras.callbacks.ModelCheckpoint(folder / "shift_{batch}.keras", save_freq=2)]


def test_a_file_loads_into_a_parallel_model(tmp_path):
    x, y = rows()
    expected, model = twins(with_shift)
    fit(expected, x, y)
    expected.save(tmp_path / "plain.keras")
    expected.save_weights(tmp_path / "plain.weights.h5")
    fit(expected, x, y)
    loaded = keras.models.load_model(tmp_path / "plain.keras", custom_objects={"Shift": Shift})
    unisono.parallel(loaded, replicas=2)
    fit(loaded, x, y)
    assert apart(expected, loaded) <= TOLERANCE
    fit(model, x, y)
    model.load_weights(tmp_path / "plain.weights.h5")
    fit(model, x, y)
    assert apart(expected, model) <= TOLERANCE


def test_this_process_has_unisono():
    assert sys.modules["unisono"] is unisono
