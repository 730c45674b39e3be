"""Old programs: their names in a process that asked for them, and whole programs of the era.

Each program is run as it was written and migrated, on two simulated GPUs, and must come to the same
weights both ways.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest

from unisono.cli import main
from unisono.compat import knowledge
from unisono.compat.migrate.source import migrate_source

BACKEND = keras.backend.backend()
HERE = Path(__file__).parent
PROGRAMS = HERE / "legacy_programs"
CHECKS = HERE / "legacy_checks.py"
NAMES = re.findall(r"^def (check_\w+)", CHECKS.read_text(), re.MULTILINE)
TIMEOUT_S = 280
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S + 20)


def run(*words: object, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("UNISONO_")}
    ours = {"UNISONO_SIMULATED_GPUS": "2", "KERAS_BACKEND": BACKEND, "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=inherited | ours | env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


# -- names -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checks")
    done = run(CHECKS, folder, folder=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_old_names(report, name):
    assert report[0][name] == ""


def test_each_translation_is_announced_once_with_its_line(report):
    lines = [line for line in report[1].splitlines() if line.startswith("unisono: ")]
    olds = [re.search(r", line \d+: (.*?) is old; write ", line)[1] for line in lines]
    assert len(set(olds)) == len(olds)
    assert (
        "unisono: old_program.py, line 2: keras.utils.multi_gpu_model is old; write " in report[1]
    )
    expected = {"lr=", "decay=", "optimizer.lr", "model.fit_generator", 'history["acc"]'}
    expected |= {'logs["acc"]', 'logs["val_acc"]', 'monitor="val_acc"', '"{val_acc}" in filepath'}
    assert expected <= set(olds)


PLAIN = """
import sys
import unisono, unisono.compat
import keras
if {has_tensorflow}:
    import tensorflow as tf
    assert not issubclass(tf.distribute.MirroredStrategy, unisono.Strategy)
    assert not hasattr(tf, "Session") and not hasattr(tf, "ConfigProto")
    assert tf.config.experimental.list_physical_devices("GPU") == []
for name in ("utils.multi_gpu_model", "optimizers.sgd", "layers.core", "backend.set_session"):
    module, name = name.split(".")
    assert not hasattr(getattr(keras, module), name), name
for owner, name in ((keras.Model, "fit_generator"), (keras.Metric, "reset_states"),
                    (keras.optimizers.Optimizer, "lr")):
    assert not hasattr(owner, name), name
assert "unisono.compat.legacy" not in sys.modules
assert not any("legacy" in type(finder).__module__ for finder in sys.meta_path)
assert type(__import__).__name__ == "builtin_function_or_method"
try:
    import horovod
except ImportError:
    print("plain")
"""


def test_nothing_is_patched_where_nobody_asked(tmp_path):
    code = PLAIN.format(has_tensorflow=BACKEND == "tensorflow")
    done = run("-c", code, folder=tmp_path, UNISONO_LEGACY="1")
    assert (done.returncode, done.stdout) == (0, "plain\n"), done.stderr


CHOICE = """
import unisono.compat.legacy
import tensorflow as tf
from keras import backend as K
{lines}
from unisono.devices import current_policy
print(len(tf.config.experimental.list_physical_devices("GPU")), current_policy())
"""
SESSION = """
config = tf.ConfigProto(device_count={"GPU": 1, "CPU": 3})
config.gpu_options.allow_growth = True
K.set_session(tf.Session(config=config))
"""
CALLS = """
gpus = tf.config.experimental.list_physical_devices("GPU")
tf.config.experimental.set_visible_devices(gpus[1], "GPU")
tf.config.experimental.set_memory_growth(gpus[1], True)
"""


@pytest.mark.parametrize(
    ("lines", "policy"),
    [
        pytest.param(
            SESSION,
            "gpus=[0], memory='grow', cpu_threads=3",
            # Elsewhere it takes the import of a second framework.
            marks=[] if BACKEND == "tensorflow" else pytest.mark.slow,
        ),
        pytest.param(CALLS, "gpus=[1], memory='grow'", marks=pytest.mark.slow),
    ],
    ids=["session", "calls"],
)
def test_choices_of_devices_are_put_in_force(tmp_path, lines, policy):
    pytest.importorskip("tensorflow")
    done = run("-c", CHOICE.format(lines=lines), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"1 {policy}\n"
    assert "write unisono.configure(" in done.stderr


def test_what_a_migrated_program_imports_is_there():
    homes = ["keras"] + ["tensorflow.keras"] * (BACKEND == "tensorflow")
    changes = [change for change in knowledge.CHANGES if change.new or change.value]
    olds = [change.old for change in changes if "Reduction." not in change.old]
    olds += [f"{module}.Model" for module in knowledge.MODULES if module.startswith("keras.engine")]
    olds += [f"{module}.init" for module in knowledge.MODULES if module.startswith("horovod")]
    names = {
        old.replace("keras", home, 1) if old.startswith("keras") else old
        for old in olds
        for home in homes
        if "callbacks" not in old and (BACKEND == "tensorflow" or not old.startswith("tensorflow"))
    }
    text = "".join(
        f"from {name.rpartition('.')[0]} import {name.rpartition('.')[2]} as n{i}\nprint(n{i})\n"
        for i, name in enumerate(sorted(names))
    )
    done = migrate_source(text.encode(), "old.py")
    assert done.remarks == []
    nodes = [node for node in ast.parse(done.code).body if not isinstance(node, ast.Expr)]
    assert len(nodes) >= len(names)
    exec(compile(ast.Module(nodes, []), "new.py", "exec"), {})


# -- programs --------------------------------------------------------------------------------------


def weights(path: Path) -> list[np.ndarray]:
    found: list[np.ndarray] = []

    def keep(name: str, item: h5py.Group | h5py.Dataset) -> None:
        # Whatever is returned but None would end the visit.
        if isinstance(item, h5py.Dataset):
            found.append(item[()])

    with h5py.File(path) as file:
        file.visititems(keep)
    return found


def both_ways(name: str, folder: Path, *words: str, launcher: tuple[str, ...] = ()) -> str:
    """Run a program as it was and migrated; what was told of the first. The weights agree."""
    old, new = PROGRAMS / f"{name}.py", folder / f"{name}.py"
    new.write_bytes(old.read_bytes())
    before = old.read_bytes()
    assert main(["migrate", "--write", str(new)]) == 0
    assert new.read_bytes() != before
    files = [folder / "old.weights.h5", folder / "new.weights.h5"]
    first = run(
        *("-m", "unisono", "run", "--legacy", old),
        *(word.format(files[0]) for word in words),
        folder=folder,
    )
    assert first.returncode == 0, first.stderr
    second = run(*launcher, new, *(word.format(files[1]) for word in words), folder=folder)
    assert second.returncode == 0, second.stderr
    assert "is old" not in second.stderr
    assert old.read_bytes() == before
    pairs = list(zip(*map(weights, files), strict=True))
    assert len(pairs) >= 4
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-6)
    return first.stderr + first.stdout


@pytest.mark.slow
def test_a_program_with_multi_gpu_model(tmp_path):
    told = both_ways("cifar10_multi_gpu", tmp_path, "{}")
    assert "line 13: keras.utils.multi_gpu_model is old; write unisono.parallel(model" in told
    assert "2 replicas" in told


@pytest.mark.slow
def test_a_program_with_mirrored_strategy(tmp_path):
    pytest.importorskip("tensorflow")
    told = both_ways("mnist_mirrored", tmp_path, "{}", "--growth")
    assert "Number of devices: 2" in told
    assert "2 Physical GPUs" in told


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "tensorflow", reason="its loop is TensorFlow's")
def test_a_program_with_a_tape(tmp_path):
    told = both_ways("tape_loop", tmp_path, "{}")
    # Inside a tf.function, whose code TensorFlow rewrites.
    lines = (PROGRAMS / "tape_loop.py").read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "= strategy.experimental_run" in text)
    assert f"tape_loop.py, line {line}: strategy.experimental_run_v2 is old" in told


@pytest.mark.slow
def test_a_program_with_image_generators_and_a_plot(tmp_path):
    pytest.importorskip("tensorflow")
    words = ("--output", str(tmp_path / "plot.png"), "--gpus", "2", "--weights", "{}")
    assert "model.fit_generator is old" in both_ways("train_images", tmp_path, *words)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_program_with_horovod(tmp_path):
    pytest.importorskip("tensorflow")
    told = both_ways("horovod_mnist", tmp_path, "{}", launcher=("-m", "unisono", "run"))
    assert "horovod.keras is old; write unisono.horovod" in told


@pytest.mark.slow
def test_one_process_is_enough(tmp_path):
    path = tmp_path / "one.weights.h5"
    words = ("-m", "unisono", "run", "--legacy", "--replicas", "1")
    done = run(*words, PROGRAMS / "cifar10_multi_gpu.py", path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(weights(path)) >= 4
