"""`multi_gpu_model` as old scripts call it, rehearsed on simulated GPUs."""

import os
import re
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
from twins import BACKEND, TOLERANCE, apart, fit, mlp, plain, rows, sgd, state

from unisono.compat import multi_gpu_model
from unisono.devices import Placement
from unisono.errors import DeviceError, ModelError


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch):
    monkeypatch.setenv("UNISONO_SIMULATED_GPUS", "4")


def template():
    keras.utils.set_random_seed(7)
    return mlp()


def gpus_of(model):
    placement = vars(model)["_unisono"].placement
    assert placement == Placement("cpu", placement.indices, is_simulated=True)
    return placement.indices


# -- which GPUs (R2) ---------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [None, 0, []], ids=str)
def test_a_falsy_number_means_all(gpus):
    model = template()
    assert multi_gpu_model(model, gpus=gpus) is model
    assert gpus_of(model) == (0, 1, 2, 3)
    assert not model.compiled


@pytest.mark.parametrize(
    ("gpus", "ids"), [(2, (0, 1)), (4, (0, 1, 2, 3)), ([0, 2], (0, 2)), ((0, 2), (0, 2))], ids=str
)
def test_numbers_and_lists(gpus, ids):
    assert gpus_of(multi_gpu_model(template(), gpus)) == ids


TOO_FEW = "For multi-gpu usage to be effective, call `multi_gpu_model` with "


MESSAGES = [
    (1, TOO_FEW + "`gpus >= 2`. Received: `gpus=1`"),
    (-3, TOO_FEW + "`gpus >= 2`. Received: `gpus=-3`"),
    (True, TOO_FEW + "`gpus >= 2`. Received: `gpus=True`"),
    ([2], TOO_FEW + "`len(gpus) >= 2`. Received: `gpus=[2]`"),
    (
        6,
        "To call `multi_gpu_model` with `gpus=6`, we expect the following devices to be "
        "available: ['/cpu:0', '/gpu:0', '/gpu:1', '/gpu:2', '/gpu:3', '/gpu:4', '/gpu:5']. "
        "However this machine only has: ['/cpu:0', '/gpu:0', '/gpu:1', '/gpu:2', '/gpu:3']. "
        "Try reducing `gpus`.",
    ),
    (
        [0, 7],
        "To call `multi_gpu_model` with `gpus=[0, 7]`, we expect the following devices to be "
        "available: ['/cpu:0', '/gpu:0', '/gpu:7']. "
        "However this machine only has: ['/cpu:0', '/gpu:0', '/gpu:1', '/gpu:2', '/gpu:3']. "
        "Try reducing `gpus`.",
    ),
    ([1, 1], "Asked for gpus=[1, 1], which repeats an id. Name each GPU once."),
    (
        "0,1",
        "Asked for gpus='0,1'; found a str. Give a number of GPUs (gpus=2) or a list of their "
        "ids (gpus=[0, 2]).",
    ),
    (
        2.0,
        "Asked for gpus=2.0; found a float. Give a number of GPUs (gpus=2) or a list of their "
        "ids (gpus=[0, 2]).",
    ),
]


@pytest.mark.parametrize(("gpus", "message"), MESSAGES, ids=[str(gpus) for gpus, _ in MESSAGES])
def test_errors_word_by_word(gpus, message):
    model = template()
    with pytest.raises(ValueError) as caught:
        multi_gpu_model(model, gpus)
    assert str(caught.value) == message
    assert isinstance(caught.value, DeviceError)
    assert "_unisono" not in vars(model)


def test_one_gpu_found_is_too_few(monkeypatch):
    monkeypatch.setenv("UNISONO_SIMULATED_GPUS", "1")
    with pytest.raises(ValueError) as caught:
        multi_gpu_model(template())
    assert str(caught.value) == TOO_FEW + "`gpus >= 2`. Received: `gpus=1`"


def test_the_usual_fallback_trains_on_one_device(monkeypatch):
    monkeypatch.setenv("UNISONO_SIMULATED_GPUS", "1")
    expected = plain(mlp)
    model = template()
    try:  # noqa: SIM105 - as it is written everywhere
        model = multi_gpu_model(model, cpu_relocation=True)
    except ValueError:
        pass
    model.compile(sgd(), "mse")
    fit(expected, *rows())
    fit(model, *rows())
    assert apart(expected, model) == 0.0


def test_something_else_than_a_model():
    with pytest.raises(ModelError, match="Asked to parallelize a list"):
        multi_gpu_model([template()], gpus=2)


# -- the template (R3) -------------------------------------------------------------------------


def test_training_is_that_of_one_device_and_shows_in_the_template(capsys):
    expected = plain(mlp)
    model = template()
    layer = model.layers[0]
    replicated = multi_gpu_model(model, gpus=2, cpu_merge=False)
    replicated.compile(sgd(), "mse")
    before = layer.get_weights()
    history = fit(replicated, *rows(), epochs=2)
    assert apart(fit(expected, *rows(), epochs=2), history) < TOLERANCE
    assert apart(expected, model) < TOLERANCE
    assert apart(model.layers[0].get_weights(), layer.get_weights()) == 0.0
    assert apart(before, layer.get_weights()) > 1e-3
    said = capsys.readouterr().out.splitlines()
    line = f"unisono: {BACKEND}, 2 replicas on gpu 0, 1 (simulated on the cpu); "
    assert said == [line + "global batch 8 = 2 x 4 per replica"]


def test_relocation_makes_a_copy_that_trains_alone():
    expected = plain(mlp)
    model = template()
    before = model.get_weights()
    relocated = multi_gpu_model(model, gpus=2, cpu_relocation=True)
    assert relocated is not model
    assert apart(before, relocated.get_weights()) == 0.0
    relocated.compile(sgd(), "mse")
    fit(relocated, *rows())
    fit(expected, *rows())
    assert apart(expected, relocated) < TOLERANCE
    assert apart(before, model.get_weights()) == 0.0
    assert "_unisono" not in vars(model)


def test_outputs_keep_their_names():
    inputs = keras.Input((4,), name="features")
    outputs = {
        name: keras.layers.Dense(1, name=name, kernel_initializer="ones")(inputs)
        for name in ("price", "size")
    }
    model = multi_gpu_model(keras.Model(inputs, outputs), gpus=2)
    model.compile(sgd(), {"price": "mse", "size": "mae"})
    x, y = rows()
    history = fit(model, x, {"price": y, "size": y})
    assert {"loss", "price_loss", "size_loss"} <= set(history)
    assert set(model.predict(x, verbose=0)) == {"price", "size"}


LOAD_AND_GO_ON = """
import sys
sys.modules["unisono"] = None
import keras
import numpy as np

x, y = np.load("rows.npz").values()
as_numpy = keras.ops.convert_to_numpy
assert not [name for name in sys.modules if name.startswith("unisono.")]
for name in sys.argv[1:]:
    model = keras.models.load_model(name)
    if name == "template.keras":
        model.load_weights("only.weights.h5")
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    np.savez(name + ".npz", *model.get_weights(), *map(as_numpy, model.optimizer.variables))
"""


def test_files_are_plain_and_training_goes_on_without_unisono(tmp_path):
    x, y = rows()
    expected = plain(mlp)
    fit(expected, x, y, epochs=3)
    model = template()
    replicated = multi_gpu_model(model, gpus=2)
    replicated.compile(sgd(), "mse")
    checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "checkpoint.keras")
    fit(replicated, x, y, epochs=2, callbacks=[checkpoint])
    replicated.save(tmp_path / "parallel.keras")
    replicated.save_weights(tmp_path / "only.weights.h5")
    model.save(tmp_path / "template.keras")
    np.savez(tmp_path / "rows.npz", x=x, y=y)

    files = ["checkpoint.keras", "parallel.keras", "template.keras"]
    run(LOAD_AND_GO_ON, tmp_path, *files)
    for name in files:
        saved = np.load(tmp_path / f"{name}.npz")
        found = [saved[f"arr_{i}"] for i in range(len(saved.files))]
        assert apart(state(expected), found) < TOLERANCE, name


# -- the script that everybody had (R1) --------------------------------------------------------

EVERYBODYS = """
import numpy as np
from keras import Input, Sequential
from keras.layers import Dense
from unisono.compat import multi_gpu_model

x, y = np.load("rows.npz").values()
model = Sequential([Input((4,)), Dense(8, activation="relu"), Dense(1)])

parallel_model = multi_gpu_model(model, gpus=8)
parallel_model.compile(loss="mse", optimizer="rmsprop")
parallel_model.fit(x, y, epochs=20, batch_size=256)

model.save("model.keras")
"""


@pytest.mark.slow
def test_the_script_that_everybody_had(tmp_path):
    """As a file without a guard: 256 is the global batch, each of 8 replicas gets 32 samples."""
    # Eight processes of torch take minutes to start where there are two cores.
    count = 4 if BACKEND == "torch" else 8
    x, y = rows(1024)
    np.savez(tmp_path / "rows.npz", x=x, y=y)
    (tmp_path / "script.py").write_text(EVERYBODYS.replace("gpus=8", f"gpus={count}"))
    said = run(None, tmp_path, "script.py", UNISONO_SIMULATED_GPUS=str(count))
    ids = ", ".join(map(str, range(count)))
    assert [line for line in said.splitlines() if line.startswith("unisono:")] == [
        f"unisono: {BACKEND}, {count} replicas on gpu {ids} (simulated on the cpu); "
        f"global batch 256 = {count} x {256 // count} per replica"
    ]
    epochs = re.split(r"Epoch \d+/20", said)[1:]
    losses = [float(re.findall(r"loss: (\d+\.\d+)", epoch)[-1]) for epoch in epochs]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    model = keras.models.load_model(tmp_path / "model.keras")
    assert model.evaluate(x, y, verbose=0) < losses[0]


def run(script: str | None, folder, *arguments: str, **env: str) -> str:
    """Run a program, or the file that is the first argument, in a fresh process."""
    command = ["-c", textwrap.dedent(script)] if script else []
    done = subprocess.run(
        [sys.executable, *command, *arguments],
        cwd=folder,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"} | env,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
