"""`import unisono` before or after TensorFlow: what is reserved, when, and what stays untouched."""

import json
import os
import subprocess
import sys
from importlib.machinery import PathFinder
from types import SimpleNamespace

import pytest

from unisono import imports, reserve
from unisono.devices import REPLICAS, SIMULATED_GPUS

# What a program sees of modules and classes: each name, and which object is behind it.
SNAPSHOT = """
def snapshot(*owners):
    def describe(value):
        # Functions and classes only: asking a module that loads itself lazily would load it.
        is_named = type(value).__name__ in ("function", "type", "ABCMeta")
        return f"{value.__module__} {value.__qualname__}" if is_named else type(value).__name__

    return {f"{o.__name__}.{n}": describe(value) for o in owners for n, value in vars(o).items()}

def ours():
    return [finder for finder in sys.meta_path if "unisono" in type(finder).__module__]
"""


def run(script: str, **env: str) -> dict:
    """Run a program in a fresh process; it ends by printing what it found as JSON."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("UNISONO_", "KERAS_"))}
    done = subprocess.run(
        [sys.executable, "-c", "import json, os, sys\n" + SNAPSHOT + script],
        env=inherited | {"TF_CPP_MIN_LOG_LEVEL": "2"} | env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def tensorflow():
    # Not importlib.util.find_spec: that asks the finder which is tested here, too.
    if PathFinder.find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed")


@pytest.fixture(scope="session")
def jax():
    if PathFinder.find_spec("jax") is None:
        pytest.skip("jax is not installed")


def test_import_loads_no_framework():
    found = run(
        """
import unisono
heavy = ("keras", "jax", "jaxlib", "tensorflow", "torch", "numpy", "cloudpickle")
print(json.dumps({"loaded": [name for name in heavy if name in sys.modules]}))
"""
    )
    assert found == {"loaded": []}


LATER = """
import importlib.util
before = list(sys.meta_path)
if IS_WITH_UNISONO:
    import unisono
    assert sys.meta_path == ours() + before
    # A program that looks whether TensorFlow is there, which is not an import.
    assert importlib.util.find_spec("tensorflow").loader is not None
    assert sys.meta_path == ours() + before
num_waiting = len(ours())

import tensorflow as tf

num_left = len(ours())
import keras
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
names = snapshot(tf, tf.config, tf.distribute, keras, keras.Model, keras.Layer, keras.Variable)
found = {
    "hooks": [num_waiting, num_left],
    "names": names,
    "loaders": [type(tf.__loader__).__name__, type(tf.__spec__.loader).__name__],
    "cpus": len(tf.config.list_logical_devices("CPU")),
}
"""


@pytest.mark.usefixtures("tensorflow")
class TestTensorFlowIsImportedLater:
    """The usual order: unisono at the top of the program, TensorFlow with Keras or after."""

    @pytest.fixture(scope="class")
    @classmethod
    def plain(cls):
        too_late = """
finders = list(sys.meta_path)
import unisono
assert sys.meta_path == finders
weights = [w.tolist() for w in model.get_weights()]
try:
    unisono.parallel(model, replicas=2)
except unisono.errors.StartedError as error:
    found["too_late"] = str(error)
found["is_unharmed"] = [w.tolist() for w in model.get_weights()] == weights
found["one_replica"] = unisono.parallel(model, replicas=1) is model
print(json.dumps(found))
"""
        script = "IS_WITH_UNISONO = False" + LATER + too_late
        return run(script, KERAS_BACKEND="tensorflow")

    @pytest.fixture(scope="class")
    @classmethod
    def with_unisono(cls):
        more = """
unisono.parallel(model, replicas=8)
try:
    unisono.parallel(model, replicas=9)
except unisono.errors.StartedError as error:
    found["too_many"] = str(error)
found["replicas"] = model._unisono.placement.num_replicas
print(json.dumps(found))
"""
        return run("IS_WITH_UNISONO = True" + LATER + more, KERAS_BACKEND="tensorflow")

    def test_eight_cpus_are_reserved(self, plain, with_unisono):
        assert plain["cpus"] == 1
        assert with_unisono["cpus"] == 8

    def test_the_hook_goes_once_it_has_fired(self, with_unisono):
        assert with_unisono["hooks"] == [1, 0]

    def test_tensorflow_shows_its_own_loader(self, plain, with_unisono):
        assert with_unisono["loaders"] == plain["loaders"]

    def test_no_name_is_patched(self, plain, with_unisono):
        assert len(plain["names"]) > 200
        assert with_unisono["names"] == plain["names"]

    def test_too_late_names_the_line_to_move(self, plain):
        assert plain["too_late"] == (
            "Asked for 2 CPU replicas; TensorFlow has started with 1 CPU device(s), and their "
            "number is fixed from then on. Move `import unisono` above the first line that uses "
            "TensorFlow (building a model, making a tensor or a data set)."
        )

    def test_too_late_harms_nothing(self, plain):
        assert plain["is_unharmed"]
        assert plain["one_replica"]

    def test_more_than_reserved_names_the_variable(self, with_unisono):
        assert with_unisono["too_many"] == (
            "Asked for 9 CPU replicas; TensorFlow has started with 8 CPU device(s), and their "
            "number is fixed from then on. Set UNISONO_REPLICAS=9 before the start, or, where the "
            "program itself calls set_logical_device_configuration, ask for 9 there."
        )
        assert with_unisono["replicas"] == 8


@pytest.mark.usefixtures("tensorflow")
def test_tensorflow_is_imported_already():
    """Not started yet, so there is still time; the environment announces more than eight."""
    found = run(
        """
import tensorflow as tf
names = snapshot(tf, tf.config)
import unisono
changed = {name for name, value in snapshot(tf, tf.config).items() if names.get(name) != value}
found = {
    "changed": sorted(changed),
    "hooks": len(ours()),
    "cpus": len(tf.config.list_logical_devices("CPU")),
}
print(json.dumps(found))
""",
        KERAS_BACKEND="tensorflow",
        UNISONO_REPLICAS="12",
    )
    assert found == {"changed": [], "hooks": 0, "cpus": 12}


@pytest.mark.usefixtures("tensorflow")
@pytest.mark.parametrize("order", ["unisono first", "own choice first"])
def test_a_programs_own_choice_is_respected(order):
    own = """
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
"""
    parts = ["import unisono\n", own]
    script = "".join(parts if order == "unisono first" else reversed(parts))
    report = 'print(json.dumps({"cpus": len(tf.config.list_logical_devices("CPU"))}))'
    assert run(script + report, KERAS_BACKEND="tensorflow") == {"cpus": 3}


@pytest.mark.usefixtures("tensorflow", "jax")
def test_on_another_backend_tensorflow_is_left_alone():
    found = run(
        """
import jax, jax.numpy
names = snapshot(jax, jax.numpy, type(jax.config))
# The program chooses its backend after unisono was imported, so that a hook waits.
import unisono
num_waiting = len(ours())
is_untouched = snapshot(jax, jax.numpy, type(jax.config)) == names
os.environ["KERAS_BACKEND"] = "jax"
import keras
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
found = {
    "hooks": [num_waiting, len(ours())],
    "is_untouched": is_untouched,
    "configured": tf.config.get_logical_device_configuration(cpu),
    "cpus": len(tf.config.list_logical_devices("CPU")),
    "jax_cpus": len(jax.devices("cpu")),
}
print(json.dumps(found))
"""
    )
    assert found == {
        "hooks": [1, 0],
        "is_untouched": True,
        "configured": None,
        "cpus": 1,
        "jax_cpus": 1,
    }


class TestWhetherAHookIsSet:
    @pytest.fixture(autouse=True)
    def fresh_process(self, monkeypatch):
        """As in a process that has imported neither Keras nor TensorFlow."""
        for name in ("keras", "tensorflow"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        for name in ("KERAS_BACKEND", SIMULATED_GPUS, REPLICAS):
            monkeypatch.delenv(name, raising=False)
        others = [f for f in sys.meta_path if type(f).__module__ != imports.__name__]
        monkeypatch.setattr(sys, "meta_path", others)
        self.num_finders = len(sys.meta_path)

    @pytest.mark.parametrize(("backend", "hooks"), [("tensorflow", 1), ("jax", 0), ("torch", 0)])
    def test_only_for_tensorflow(self, monkeypatch, backend, hooks):
        monkeypatch.setenv("KERAS_BACKEND", backend)
        reserve.reserve()
        assert len(sys.meta_path) - self.num_finders == hooks

    @pytest.mark.parametrize(
        ("keras_json", "backend"),
        [
            ('{"backend": "torch"}', "torch"),
            ('{"floatx": "float32"}', "tensorflow"),
            ("not json", "tensorflow"),
            ("[]", "tensorflow"),
            (None, "tensorflow"),
        ],
    )
    def test_keras_json_decides_unless_the_environment_does(
        self, monkeypatch, tmp_path, keras_json, backend
    ):
        monkeypatch.setenv("KERAS_HOME", str(tmp_path))
        if keras_json is not None:
            (tmp_path / "keras.json").write_text(keras_json)
        assert imports.keras_backend() == backend
        monkeypatch.setenv("KERAS_BACKEND", "jax")
        assert imports.keras_backend() == "jax"

    def test_keras_itself_knows_best(self, monkeypatch):
        keras = SimpleNamespace(backend=SimpleNamespace(backend=lambda: "torch"))
        monkeypatch.setitem(sys.modules, "keras", keras)
        monkeypatch.setenv("KERAS_BACKEND", "jax")
        assert imports.keras_backend() == "torch"


class TestWhatIsConfigured:
    """On machines that are not here: a stand-in for tf.config that sees a GPU."""

    @pytest.fixture
    def configured(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "keras", raising=False)
        monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
        return []

    @pytest.fixture
    def tf_with_gpu(self, configured):
        return SimpleNamespace(
            config=SimpleNamespace(
                list_physical_devices=lambda kind: [f"{kind}:0"],
                get_logical_device_configuration=lambda device: None,
                set_logical_device_configuration=lambda device, parts: configured.append(
                    (device, len(parts))
                ),
                LogicalDeviceConfiguration=object,
            )
        )

    def test_nothing_beside_a_gpu(self, monkeypatch, tf_with_gpu, configured):
        monkeypatch.delenv(SIMULATED_GPUS, raising=False)
        reserve._configure(tf_with_gpu)
        assert configured == []

    def test_simulated_gpus_need_cpus_all_the_same(self, monkeypatch, tf_with_gpu, configured):
        monkeypatch.delenv(REPLICAS, raising=False)
        monkeypatch.setenv(SIMULATED_GPUS, "10")
        reserve._configure(tf_with_gpu)
        assert configured == [("CPU:0", 11)]  # The CPU itself beside them.
