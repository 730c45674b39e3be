"""Recurrent layers on JAX: replicas all-reduce gradients once a step, not at every time step."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from twins import BACKEND

if BACKEND != "jax":
    pytest.skip("a loop that XLA partitions", allow_module_level=True)

PROGRAM = """
import keras, numpy, unisono

for layer in (keras.layers.LSTM(4), keras.layers.Bidirectional(keras.layers.GRU(4))):
    model = keras.Sequential([keras.Input((9, 3)), keras.layers.Masking(), layer])
    model.compile("sgd", "mse")
    unisono.parallel(model, replicas=2)
    model.fit(numpy.ones((8, 9, 3)), numpy.ones((8, 1)), batch_size=8, verbose=0)
"""


def test_no_loop_of_a_step_communicates(tmp_path: Path):
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*step.*"
    env = {**os.environ, "XLA_FLAGS": flags}
    subprocess.run([sys.executable, "-c", PROGRAM], env=env, check=True, timeout=120)
    steps = [path.read_text() for path in tmp_path.glob("*jit_step*cpu_after_optimizations.txt")]
    assert len(steps) == 2
    for text in steps:
        assert " while(" in text
        computations = re.split(r"\n(?=%|ENTRY)", text)
        reducing = [part for part in computations if " all-reduce(" in part]
        assert len(reducing) == 1
        assert reducing[0].startswith("ENTRY")
        assert reducing[0].count(" all-reduce(") == 1
        assert " all-gather(" not in text
