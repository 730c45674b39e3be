"""A machine with GPUs that is not here: a stand-in for the driver, below the real NVML binding."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
from launching import Run, end_all, pids_in

SUPPORT = Path(__file__).with_name("support")
# Programs that tests start import the exactness cases by their package's name.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(SUPPORT.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)
# What runs of tests publish of themselves is nobody's affair.
os.environ["UNISONO_RUNS"] = ""
# A shell has its background jobs ignore Ctrl-C, which tests press.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
NAMES = ("XLA_", "UNISONO_", "KERAS_", "STAND_IN_", "CUDA_")


def build(source: str, library: Path) -> None:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("there is no C compiler (cc) to build the stand-in driver with")
    name = f"-Wl,-soname,{library.name}"
    command = [compiler, "-shared", "-fPIC", name, "-o", str(library), str(SUPPORT / source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def driver_folder(tmp_path_factory) -> Path:
    """A folder with the stand-in for NVML."""
    if PathFinder.find_spec("pynvml") is None:
        pytest.skip("nvidia-ml-py is not installed")
    folder = tmp_path_factory.mktemp("driver")
    build("stand_in_nvml.c", folder / "libnvidia-ml.so.1")
    return folder


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory) -> Path:
    """A stand-in for CUDA itself, to be loaded by its path: a framework would expect more of it."""
    library = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    build("stand_in_cuda.c", library)
    return library


def run_process(arguments: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a fresh process that inherits no choice of devices."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(NAMES)}
    return subprocess.run(
        [sys.executable, *arguments],
        env=inherited | env,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="session")
def plain_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`plain_python(["-m", "unisono", ...], NAME=value)` on this machine as it is."""
    return run_process


@pytest.fixture(scope="session")
def python_with_gpus(driver_folder) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The same on a machine whose driver answers as the STAND_IN_ variables say."""

    def run(arguments: list[str], **env: str) -> subprocess.CompletedProcess[str]:
        return run_process(arguments, LD_LIBRARY_PATH=str(driver_folder), **env)

    return run


@pytest.fixture(scope="session")
def answer(python_with_gpus) -> Callable[..., Any]:
    """What an expression of Python is on that machine, as JSON carries it."""
    return _answer_of(python_with_gpus)


@pytest.fixture(scope="session")
def plain_answer(plain_python) -> Callable[..., Any]:
    """The same on this machine as it is."""
    return _answer_of(plain_python)


def _answer_of(python: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., Any]:
    def run(expression: str, **env: str) -> Any:
        script = f"""
import dataclasses, json, os, sys, unisono
from unisono.devices import *
def told(call):
    try:
        return call()
    except unisono.UnisonoError as error:
        return f"{{type(error).__name__}}: {{error}}"
print(json.dumps({expression}, default=dataclasses.asdict))
loaded = {{"keras", "jax", "tensorflow", "torch"}} & set(sys.modules)
assert not loaded, loaded
"""
        done = python(["-c", script], **env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture
def run() -> Iterator[Callable[..., Run]]:
    """`run("--replicas", 2, script)` starts a launcher, which is ended with the test."""
    started = []

    def start(*words: object, prefix: Sequence[str] = (), **env: str) -> Run:
        started.append(Run(words, prefix, **env))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where processes write their numbers; whoever is left is ended with the test."""
    yield tmp_path
    end_all(pids_in(tmp_path))


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as trial:
        return trial.getsockname()[1]
