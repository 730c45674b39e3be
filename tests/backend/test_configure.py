"""`configure` on a backend: that it holds, when it is too late, and what is then left alone."""

import json
from typing import Any

import keras
import pytest
from scripts import run

BACKEND = keras.backend.backend()

COMMON = """
import collections, json, os, sys
from pathlib import Path

def threads():
    # How many threads the backend computes with, as it says itself.
    if "jax" in sys.modules and os.environ["KERAS_BACKEND"] == "jax":
        tasks = Path("/proc/self/task").iterdir()
        return sum("XLAEigen" in (task / "comm").read_text() for task in tasks)
    if os.environ["KERAS_BACKEND"] == "tensorflow":
        import tensorflow as tf
        intra = tf.config.threading.get_intra_op_parallelism_threads()
        assert tf.config.threading.get_inter_op_parallelism_threads() == intra
        return intra
    import torch
    return torch.get_num_threads()

def determinism():
    # What the backend says itself: deterministic kernels, and full float32.
    if os.environ["KERAS_BACKEND"] == "jax":
        import jax
        flag = "--xla_gpu_deterministic_ops=true" in os.environ.get("XLA_FLAGS", "").split()
        return [flag, jax.config.jax_default_matmul_precision == "highest"]
    if os.environ["KERAS_BACKEND"] == "tensorflow":
        import tensorflow as tf
        from tensorflow.python.framework.config import is_op_determinism_enabled
        is_tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
        return [is_op_determinism_enabled(), not is_tf32]
    import torch
    cublas = os.environ.get("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"
    cudnn = torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    is_tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    flag = torch.are_deterministic_algorithms_enabled()
    return [flag and cudnn and cublas, not is_tf32]

def told(call, **arguments):
    try:
        return call(**arguments)
    except unisono.UnisonoError as error:
        return [type(error).__name__, str(error)]
"""


def found_by(script: str, *arguments: str, **env: str) -> Any:
    """What a program prints at last, as JSON."""
    done = run("-c", COMMON + script, *arguments, **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


FIRST = """
import unisono
unisono.configure(gpus=[0, 2], cpu_threads=3, deterministic=True)
# As on a machine with eight cores, of which two replicas have four each.
os.sched_getaffinity = lambda pid: set(range(8))
import keras
import numpy as np

FOLDER = sys.argv[-1]

class Watched(keras.layers.Layer):
    def call(self, x):
        from unisono.devices import current_policy
        note = [current_policy().cpu_threads, threads(), *determinism()]
        Path(FOLDER, f"{os.getpid()}.json").write_text(json.dumps(note))
        return x

keras.utils.set_random_seed(0)
layers = [keras.Input((4,)), keras.layers.Dense(1)]
model = keras.Sequential(layers + [Watched()] * (keras.backend.backend() == "torch"))
found = {"threads": threads(), "determinism": determinism()}
model = unisono.parallel(model)
model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
history = model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)
found["losses"] = len(history.history["loss"])
found["threads_after"] = threads()
found["replicas"] = model._unisono.placement.indices
found["missing"] = told(unisono.parallel, model=model, gpus=[2])
notes = [json.loads(path.read_text()) for path in sorted(Path(FOLDER).glob("*.json"))]
print(json.dumps(found | {"notes": notes}))
"""


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A program that configures at its top, before any framework is imported."""
    folder = tmp_path_factory.mktemp("notes")
    return found_by(FIRST, str(folder), UNISONO_SIMULATED_GPUS="4")


def test_the_backend_computes_with_so_many_threads(first):
    assert first["threads"] == 3
    assert first["losses"] == 2


def test_the_backend_is_deterministic_and_exact(first):
    assert first["determinism"] == [True, True]


def test_only_the_chosen_gpus_are_left(first):
    assert first["replicas"] == [0, 1]
    assert first["missing"] == [
        "DeviceError",
        "Asked for GPUs [2]; this machine has [0, 1]. Choose among those, or leave gpus= out to "
        "take all.",
    ]


@pytest.mark.skipif(BACKEND != "torch", reason="only torch's replicas are processes")
def test_worker_processes_obey(first):
    assert first["notes"] == [[3, 3, True, True]] * 2


STARTED = """
import keras, unisono
from unisono.devices import current_policy
backend = keras.backend.backend()

def state():
    ours = ("CUDA_", "CUBLAS_", "JAX_", "XLA_", "PJRT_", "PYTORCH_", "UNISONO_")
    names = [name for name in os.environ if name.startswith(ours)]
    return [current_policy().to_text(), {name: os.environ[name] for name in names}]

# The framework is imported, but has not started.
unisono.configure(cpu_threads=2, memory="4GiB")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
found = {"threads": threads(), "determinism": determinism()}
if backend == "jax":
    from jaxlib.xla_client import generate_pjrt_gpu_plugin_options
    found["options"] = generate_pjrt_gpu_plugin_options()
if backend == "torch":
    model = unisono.parallel(model, replicas=2)
before = state()
found["too_late"] = told(unisono.configure, gpus=[0])
found["too_late_for_bits"] = told(unisono.configure, deterministic=True)
found["contradiction"] = told(unisono.configure, cpu_threads=4)
found["nonsense"] = told(unisono.configure, memory="lots")
found["same"] = told(unisono.configure, cpu_threads=2)
found["is_unharmed"] = state() == before and [threads(), determinism()] == [2, [False, False]]
found["output"] = tuple(model(keras.ops.ones((2, 4))).shape)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def started(driver_folder):
    """A program that configures late, on a machine with one GPU that no backend can use."""
    return found_by(STARTED, LD_LIBRARY_PATH=str(driver_folder), STAND_IN_GPUS="1")


def test_an_imported_framework_can_still_be_configured(started):
    assert started["threads"] == 2


@pytest.mark.skipif(BACKEND != "jax", reason="asks JAX what it would start a GPU with")
def test_a_gpu_would_start_with_a_quarter_of_its_memory(started):
    options = started["options"]
    assert (options["memory_fraction"], options["preallocate"]) == (0.25, False)


def test_after_the_start_it_says_which_line_to_move(started):
    kind, text = started["too_late"]
    framework, started_what = {
        "jax": ("JAX", "JAX has started its devices"),
        "tensorflow": ("TensorFlow", "TensorFlow has started its devices"),
        "torch": ("torch", "unisono has started torch's worker processes"),
    }[BACKEND]
    assert kind == "StartedError"
    assert text.startswith(
        f"Asked for unisono.configure(gpus=[0]); {started_what}, and what it took stays. Move the "
        f"line `unisono.configure(...)` above the first line that uses {framework} ("
    )


def test_kernels_are_chosen_before_the_start(started):
    kind, text = started["too_late_for_bits"]
    assert kind == "StartedError"
    assert text.startswith("Asked for unisono.configure(deterministic=True); ")
    assert not started["determinism"][0]


def test_other_mistakes_are_told_as_ever(started):
    assert started["contradiction"] == [
        "DeviceError",
        "Asked for cpu_threads=4; an earlier call of unisono.configure has set cpu_threads=2. "
        "Make one call.",
    ]
    assert started["nonsense"][0] == "DeviceError"


def test_too_late_harms_nothing(started):
    assert started["same"] is None
    assert started["is_unharmed"]
    assert started["output"] == [2, 1]


@pytest.mark.skipif(BACKEND == "tensorflow", reason="TensorFlow can hide GPUs when CUDA runs")
def test_gpus_cannot_be_hidden_once_cuda_has_started(driver_folder, cuda_library):
    script = """
import ctypes, importlib, unisono
importlib.import_module(os.environ["KERAS_BACKEND"])
ctypes.CDLL(sys.argv[-1]).cuInit(0)
found = [told(unisono.configure, gpus=[0]), os.environ.get("CUDA_VISIBLE_DEVICES")]
print(json.dumps([*found, told(unisono.configure, memory="grow")]))
"""
    env = {"LD_LIBRARY_PATH": str(driver_folder), "STAND_IN_GPUS": "2"}
    told, variable, after = found_by(script, str(cuda_library), **env)
    assert told[0] == "StartedError"
    assert told[1].startswith(
        "Asked for unisono.configure(gpus=[0]); CUDA has started in this process, and what"
    )
    assert variable is None
    assert after is None
