"""A driver with GPUs below a backend that sees none, and TensorFlow beside JAX on several GPUs."""

import os
import sys
from types import ModuleType

import pytest

BACKEND = os.environ.get("KERAS_BACKEND", "tensorflow")
INSTALL = {
    "jax": 'pip install "jax[cuda12]"',
    "tensorflow": 'pip install "tensorflow[and-cuda]"',
    "torch": "pip install --force-reinstall torch --index-url "
    "https://download.pytorch.org/whl/cu126",
}
SCRIPT = """
import os, warnings
import keras, unisono
for visible in ("", "0"):
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            unisono.parallel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
    for each in caught:
        if "GPU(s)" in str(each.message):
            print("warned:", visible, each.message, each.filename)
"""


def test_a_warning_with_the_line_to_install(python_with_gpus):
    env = {"KERAS_BACKEND": BACKEND, "STAND_IN_GPUS": "2", "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = python_with_gpus(["-c", SCRIPT], **env)
    lines = [line for line in done.stdout.splitlines() if line.startswith("warned:")]
    assert len(lines) == 1, done.stdout + done.stderr  # Once, and not where GPUs are hidden.
    assert lines[0].startswith("warned: 0 The driver shows 1 GPU(s) and ")
    assert INSTALL[BACKEND] in lines[0]
    assert lines[0].endswith(" <string>")  # The user's line.


@pytest.mark.skipif(BACKEND != "jax", reason="JAX's communicators")
def test_tensorflow_beside_jax_on_several_gpus(monkeypatch):
    from unisono.backends import load_backend
    from unisono.devices import Placement

    backend = load_backend()
    monkeypatch.setitem(sys.modules, "tensorflow", ModuleType("tensorflow"))
    backend.prepare(Placement("gpu", (0,)))  # No collective: no warning, which would be an error.
    with pytest.warns(UserWarning, match="jax#39167"):
        backend.prepare(Placement("gpu", (0, 1)))
