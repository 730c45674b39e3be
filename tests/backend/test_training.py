"""Training programs and recipes, run as a user runs them, and their parts where that is enough."""

import ast
import csv
import errno
import io
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from scripts import run, start

import unisono
from unisono import schedules, training
from unisono.cli import train as train_command
from unisono.training import recorder

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
LOAD = """
import sys; sys.modules["unisono"] = None
import keras, numpy as np
model = keras.models.load_model(sys.argv[1])
model.fit(np.zeros((4, 8, 8, 1)), np.zeros(4), verbose=0)
print(model.count_params(), float(model.optimizer.learning_rate.numpy()))
"""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("UNISONO_REPLICAS", "UNISONO_SIMULATED_GPUS", "UNISONO_DATA"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
def test_a_page_of_one_s_own_on_two_replicas(tmp_path):
    """As in `unisono recipe digits > train.py; python train.py --output plot.png --gpus 2`."""
    (tmp_path / "train.py").write_text(train_command.page("digits"))
    words = ["--output", "some plot.png", "--gpus", "2", "--stop-after", "3", "--seed", "1"]
    done = run("train.py", *words, cwd=tmp_path, UNISONO_SIMULATED_GPUS="2")
    assert done.returncode == 0, done.stderr
    said = done.stdout
    batch = (
        "32 per replica × 2 = 64 global; learning rate 0.02 × 2 = 0.04 after 2 epochs of warm-up"
    )
    assert batch in said
    assert said.count("epoch 3/3  ") == 1
    assert "samples/s (" in said
    assert "replicas hold the same model" in said
    check_files(tmp_path, "some plot.png", num_epochs=3, num_replicas=2)
    loaded = run("-c", LOAD, str(tmp_path / "model.keras"))
    assert loaded.returncode == 0, loaded.stderr


@pytest.mark.slow
def test_damaged_data_is_one_line_from_all_processes(tmp_path):
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04 and no more")
    words = ["--replicas", "2", "--data", "cut.npz", "--output", str(tmp_path)]
    done = run("-m", "unisono", "train", "mnist", *words, cwd=tmp_path)
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if "cut.npz" in line]
    assert len(said) == 1
    assert said[0].startswith("mnist: cut.npz is damaged or truncated (BadZipFile: ")
    assert "Traceback" not in done.stderr


def check_files(folder: Path, plot: str, *, num_epochs: int, num_replicas: int) -> Any:
    record = json.loads((folder / "history.json").read_text())
    assert record["backend"] == keras.backend.backend()
    assert (record["num_replicas"], record["settings"]["seed"]) == (num_replicas, 1)
    assert record["versions"]["keras"] == keras.__version__
    assert record["devices"]
    with (folder / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == list(range(1, num_epochs + 1))
    for row, kept in zip(rows, record["history"], strict=True):
        assert {name: float(value) for name, value in row.items()} == pytest.approx(kept)
        assert kept["epoch_s"] >= kept["train_s"] > 0
    assert rows[-1]["val_accuracy"] > rows[0]["val_accuracy"]
    assert (folder / plot).read_bytes().startswith(PNG_SIGNATURE)
    assert {path.name for path in folder.iterdir()} - {"train.py"} == {
        "history.csv",
        "history.json",
        "model.keras",
        plot,
    }
    return record


def small_run(folder: Path, *words: str) -> training.Run:
    arguments = ["--output", str(folder), "--data", "synthetic:64", *words]
    return training.begin(
        name="small", epochs=2, batch_per_replica=16, learning_rate=0.01, arguments=arguments
    )


def small_model(run: training.Run) -> Any:
    run.prepare_keras()
    model = keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)]
    )
    model.compile(
        keras.optimizers.SGD(schedules.PolynomialDecay(run.learning_rate, 8)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def fit(run: training.Run, model: Any, *callbacks: Any) -> None:
    (x, y), test = run.load("digits", (8, 8, 1), 10)
    with run.recording(model, num_samples=len(x)) as record:
        model.fit(
            x,
            y,
            batch_size=run.global_batch,
            epochs=run.num_epochs,
            validation_data=test,
            callbacks=[record, *callbacks],
            verbose=0,
        )


def test_a_run_in_this_process(tmp_path, capsys):
    small = small_run(tmp_path, "--seed", "1")
    model = small_model(small)
    fit(small, model)
    assert "16 per replica × 1 = 16 global; learning rate 0.01" in capsys.readouterr().out
    record = json.loads((tmp_path / "history.json").read_text())
    assert [row["learning_rate"] for row in record["history"]] == pytest.approx([0.005, 0.0])
    assert record["is_interrupted"] is False
    again = keras.models.load_model(tmp_path / "model.keras")
    for ours, theirs in zip(model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_same_seed_gives_the_same_run(tmp_path):
    losses = []
    for seed in ("1", "1", "2"):
        small = small_run(tmp_path, "--seed", seed)
        fit(small, small_model(small))
        record = json.loads((tmp_path / "history.json").read_text())
        losses.append([row["val_loss"] for row in record["history"]])
    assert losses[0] == losses[1] != losses[2]


def test_the_saved_copy_of_models_of_all_kinds():
    """Compiled by names, not compiled, and of a class that only itself knows how to build."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    assert not recorder.plain_copy(model).compiled
    model.compile("adam", "mse")
    copy = recorder.plain_copy(model)
    assert (copy.compiled, type(copy.optimizer).__name__) == (True, "Adam")
    np.testing.assert_array_equal(copy.get_weights()[0], model.get_weights()[0])

    class Own(keras.Model):
        def __init__(self, width):
            super().__init__()

        def call(self, x):
            return x

    own = Own(3)
    assert recorder.plain_copy(own) is own


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [io.StringIO, _Terminal])
def test_a_bar_on_a_terminal_alone(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("unisono.training.recorder._PAUSE_S", 0.0)
    output = kind()
    monkeypatch.setattr("sys.stdout", output)
    small = small_run(tmp_path)
    fit(small, small_model(small))
    is_drawn = [text in output.getvalue() for text in ("\r\x1b[Kepoch 1/", "[=", "\r\x1b[Ktest")]
    assert is_drawn == [output.isatty()] * 3


def test_keras_may_run_ahead_of_the_device(tmp_path):
    """A callback at each batch would wait for its logs."""
    small = small_run(tmp_path)
    with small.recording(small_model(small), num_samples=8) as record:
        for name in ("on_train_batch_begin", "on_train_batch_end", "on_test_batch_end"):
            assert getattr(type(record), name) is getattr(keras.callbacks.Callback, name)


class _Press(keras.callbacks.Callback):
    """Ctrl-C, in the middle of the second epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.params["epochs"] > 1 and len(self.model.history.epoch) == 1 and batch == 1:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_saves_what_there_is(tmp_path, capsys):
    before = signal.getsignal(signal.SIGINT)
    small = small_run(tmp_path, "--epochs", "5")
    with pytest.raises(SystemExit) as ended:
        fit(small, small_model(small), _Press())
    assert ended.value.code == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert "Ctrl-C: this step is the last" in capsys.readouterr().out
    record = json.loads((tmp_path / "history.json").read_text())
    assert record["is_interrupted"] is True
    assert len(record["history"]) == 1
    keras.models.load_model(tmp_path / "model.keras")


def test_another_error_is_not_a_result(tmp_path):
    class Fail(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            raise ZeroDivisionError("boom")

    small = small_run(tmp_path)
    with pytest.raises(ZeroDivisionError, match="boom"):
        fit(small, small_model(small), Fail())
    assert not (tmp_path / "model.keras").exists()


def test_a_full_disk_keeps_the_model_and_the_other_files(tmp_path, monkeypatch):
    def full(path: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(recorder, "plain_copy", lambda model: SimpleNamespace(save=full))
    small = small_run(tmp_path)
    model = small_model(small)
    with pytest.raises(unisono.OutputError, match=r"model.keras: No space left on device"):
        fit(small, model)
    assert model.predict(np.zeros((1, 8, 8, 1)), verbose=0).shape == (1, 10)
    assert {path.name for path in tmp_path.iterdir()} == {
        "history.csv",
        "history.json",
        "plot.png",
    }


def test_a_full_disk_in_between_does_not_end_the_training(tmp_path, monkeypatch, capsys):
    written = []
    real = recorder.to_json

    def sometimes_full(record: Any, path: Path) -> None:
        written.append(path)
        if len(written) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(record, path)

    monkeypatch.setattr(recorder, "to_json", sometimes_full)
    small = small_run(tmp_path)
    fit(small, small_model(small))
    assert "warning: Could not write" in capsys.readouterr().err
    assert len(json.loads((tmp_path / "history.json").read_text())["history"]) == 2


@pytest.fixture(scope="module")
def minigooglenet() -> Any:
    """The net of the page, without running the rest of it."""
    tree = ast.parse(train_command.page("cifar10"))
    names = {
        "keras": keras,
        "layers": keras.layers,
        "np": np,
        "run": SimpleNamespace(seed=0, num_replicas=4),
    }
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    exec(compile(tree, "cifar10.py", "exec"), names)
    return names["build_model"](mean=np.full((32, 32, 3), 100.0, "float32"))


def test_minigooglenet_is_the_published_one(minigooglenet):
    sizes = [int(np.prod(weight.shape)) for weight in minigooglenet.trainable_weights]
    assert sum(sizes) == 1_652_826
    kinds = [type(layer).__name__ for layer in minigooglenet.layers]
    assert (kinds.count("Conv2D"), kinds.count("MaxPooling2D")) == (19, 2)
    norms = [x for x in minigooglenet.layers if isinstance(x, keras.layers.BatchNormalization)]
    assert {norm.momentum for norm in norms} == {0.8**4}  # For four replicas.


def augmentation_of(model: Any) -> Any:
    last = next(layer for layer in model.layers if type(layer).__name__ == "RandomFlip")
    return keras.Model(model.input, last.output)


def test_augmentation_is_off_in_evaluation_and_subtracts_the_mean(minigooglenet):
    images = np.random.default_rng(0).integers(0, 255, (4, 32, 32, 3)).astype("uint8")
    seen = keras.ops.convert_to_numpy(augmentation_of(minigooglenet)(images, training=False))
    np.testing.assert_allclose(seen, images.astype("float32") - 100.0, atol=1e-3)


def test_augmentation_shifts_and_flips_each_image_in_its_own_way(minigooglenet):
    """A picture that grows to the right: its flip falls, and a shift repeats a margin."""
    ramp = np.tile(np.arange(32, dtype="uint8")[None, None, :, None] * 4, (64, 32, 1, 3))
    layer = augmentation_of(minigooglenet)
    seen = keras.ops.convert_to_numpy(layer(ramp, training=True)) + 100.0
    rises = seen[:, 16, 31, 0] > seen[:, 16, 0, 0]
    assert 10 < rises.sum() < 54
    as_drawn = np.where(rises[:, None], seen[:, 16, :, 0], seen[:, 16, ::-1, 0]) / 4
    shifts = as_drawn[:, 16] - 16
    assert np.abs(shifts).max() <= 3.2 + 1e-3
    assert np.abs(shifts).max() > 2
    assert len(np.unique(shifts.round(3))) > 40
    # Nearest fill: no value that the image has not.
    assert as_drawn.min() > -1e-3
    assert as_drawn.max() < 31 + 1e-3
    again = keras.ops.convert_to_numpy(layer(ramp, training=True)) + 100.0
    assert not np.allclose(seen, again)


def test_augmentation_differs_between_replicas():
    """One and the same picture on each replica; what they make of it shows in two means."""
    ramp = np.tile(np.arange(32, dtype="float32")[None, None, :, None], (2, 32, 1, 1))
    images = keras.Input((32, 32, 1))
    x = keras.layers.RandomTranslation(0.1, 0.1, fill_mode="nearest", seed=1)(images)
    outputs = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(x[:, 16, 16])
    model = unisono.parallel(keras.Model(images, outputs), replicas=2)
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    logs = model.fit(ramp, np.zeros((2, 1)), batch_size=2, epochs=3, verbose=0).history
    # The variance of the two: the mean of squares without the square of the mean.
    variances = np.array(logs["loss"]) - np.array(logs["mae"]) ** 2
    assert variances.min() > 1e-3
    assert variances.max() < 3.2**2


# A recipe is the same on every backend, and long on some: each runs on one.
OTHER_RECIPES = {
    "jax": ("mnist", ["--data", "synthetic:256", "--lr-scaling", "sqrt"]),
    "tensorflow": ("cifar10", ["--data", "synthetic:128", "--batch-per-replica", "16"]),
    "torch": ("resnet50", ["--data", "synthetic:8", "--batch-per-replica", "2"]),
}


@pytest.mark.slow
def test_another_recipe_runs_on_two_replicas(tmp_path):
    name, words = OTHER_RECIPES[keras.backend.backend()]
    words = [*words, "--replicas", "2", "--stop-after", "1", "--output", str(tmp_path)]
    done = run("-m", "unisono", "train", name, *words)
    assert done.returncode == 0, done.stderr
    assert f"results: {tmp_path}" in done.stdout
    record = json.loads((tmp_path / "history.json").read_text())
    assert (record["recipe"], record["num_replicas"]) == (name, 2)
    assert np.isfinite(record["history"][0]["val_loss"])


@pytest.mark.slow
def test_mixed_precision(tmp_path):
    words = ["--mixed-precision", "--stop-after", "2", "--output", str(tmp_path)]
    done = run("-m", "unisono", "train", "digits", *words)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "history.json").read_text())["history"][1]["val_accuracy"] > 0.5


@pytest.mark.slow
def test_the_demo_compares_one_replica_with_two(tmp_path):
    words = ["--replicas", "2", "--compare", "--output", str(tmp_path / "demo.png")]
    done = run("-m", "unisono", "train", "digits", *words)
    assert done.returncode == 0, done.stderr
    assert "speed-up" in done.stdout
    assert "efficiency" in done.stdout
    for folder in ("1-replica", "2-replicas"):
        record = json.loads((tmp_path / folder / "history.json").read_text())
        assert record["history"][-1]["val_accuracy"] >= 0.97
    assert (tmp_path / "demo.png").read_bytes().startswith(PNG_SIGNATURE)
    both = json.loads((tmp_path / "history.json").read_text())["runs"]
    assert [each["num_replicas"] for each in both] == [1, 2]


@pytest.mark.slow
def test_ctrl_c_in_a_run_of_processes(tmp_path):
    words = ["--replicas", "2", "--epochs", "100000", "--output", str(tmp_path)]
    process = start("-m", "unisono", "train", "digits", *words)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("epoch 2/"):
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert "results: " in out
    record = json.loads((tmp_path / "history.json").read_text())
    assert record["is_interrupted"] is True
    assert len(record["history"]) >= 2
    assert (tmp_path / "model.keras").exists()
    keras.models.load_model(tmp_path / "model.keras")
