"""The names that users import, pinned: adding one is a decision, losing one breaks programs."""

import collections
import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import unisono
import unisono.compat
import unisono.training

PUBLIC = {
    unisono: [
        "ConfigurationError",
        "DataError",
        "Device",
        "LaunchError",
        "ModelError",
        "OutputError",
        "Preempted",
        "Strategy",
        "Topology",
        "UnisonoError",
        "WorkerError",
        "check_replicas",
        "compute_average_loss",
        "configure",
        "device",
        "devices",
        "log_placement",
        "parallel",
        "release",
        "scale_regularization_loss",
        "spawn",
        "topology",
        "where",
    ],
    unisono.compat: ["MirroredStrategy", "multi_gpu_model", "mxnet"],
    unisono.training: ["Run", "begin"],
    unisono.compat.mxnet: ["Context", "compile", "cpu", "gpu"],
}
FUNCTIONS = [
    getattr(module, name)
    for module, names in PUBLIC.items()
    for name in names
    if inspect.isfunction(getattr(module, name))
]


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_the_public_names(module):
    assert sorted(module.__all__) == PUBLIC[module]
    assert all(hasattr(module, name) for name in module.__all__)


def test_nothing_else_is_there_to_find():
    """Modules of ours aside, every other name begins with an underscore."""
    visible = [
        name
        for name, value in vars(unisono).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    ]
    assert sorted(visible) == PUBLIC[unisono]


def test_what_commands_need_is_installed_with_the_core_and_loaded_where_it_is_used():
    needed = {
        "matplotlib": "matplotlib",
        "nvidia-ml-py": "pynvml",
        "psutil": "psutil",
        "rich": "rich",
    }
    required = importlib.metadata.requires("unisono") or []
    core = [line for line in required if "extra ==" not in line]
    assert all(any(line.startswith(name) for line in core) for name in needed), core
    program = f"import sys, unisono, unisono.cli; print({set(needed.values())} & {{*sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_every_public_function_has_types(function):
    parameters = inspect.signature(function).parameters.values()
    assert all(parameter.annotation is not parameter.empty for parameter in parameters)
    assert inspect.signature(function).return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (unisono.configure, "(gpus=None, memory=None, cpu_threads=None, *, deterministic=None)"),
        (unisono.devices, "()"),
        (unisono.parallel, "(model, *, replicas=None, gpus=None, sync_batch_norm=True)"),
        (unisono.release, "(model)"),
        (unisono.device, "(name)"),
        (unisono.where, "(value)"),
        (unisono.log_placement, "(is_on=True)"),
        (unisono.compat.mxnet.compile, "(model, *args, context=None, **kwargs)"),
        (unisono.compat.mxnet.gpu, "(device_id=0)"),
        (
            unisono.compat.multi_gpu_model,
            "(model, gpus=None, cpu_merge=True, cpu_relocation=False)",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_signatures(function, signature):
    parameters = [
        parameter.replace(annotation=parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
    ]
    assert str(inspect.Signature(parameters)) == signature


def test_the_version_is_that_of_the_package():
    assert [int(part) for part in unisono.__version__.split(".")] >= [0, 1, 0]


def test_submodules_are_imported_at_their_first_use():
    """Without an import statement of their own, and without Keras before one is used."""
    program = (
        "import sys, unisono; assert 'keras' not in sys.modules; "
        "unisono.compat.multi_gpu_model, unisono.schedules.WarmUp, unisono.callbacks.DeviceStats"
    )
    env = os.environ | {"KERAS_BACKEND": "numpy"}  # The one that loads no framework.
    done = subprocess.run([sys.executable, "-c", program], check=False, env=env)
    assert done.returncode == 0
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        _ = unisono.absent


def test_errors_exported_by_earlier_releases_are_deprecated():
    with pytest.warns(DeprecationWarning, match=r"use unisono\.errors\.ConfigurationError"):
        old = unisono.SettingError
    assert old is unisono.ConfigurationError
    with pytest.warns(DeprecationWarning, match=r"use unisono\.errors\.PeerLostError"):
        assert issubclass(unisono.PeerLostError, unisono.WorkerError)


# A backend implements these for itself; the last two are names of TensorFlow.
SAME_IDEA = {"ChangeTracker", "CpuLayers", "Group", "SingleReplica", "MirroredStrategy", "Session"}


def test_a_class_name_has_one_meaning():
    package = Path(unisono.__file__).parent
    names = [
        name
        for path in package.rglob("*.py")
        for name in re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    twice = {name for name, count in collections.Counter(names).items() if count > 1}
    assert twice <= SAME_IDEA


def test_modules_are_not_imported_by_strings():
    """import-linter does not see those: only the two packages that choose a module do so."""
    package = Path(unisono.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"import_module\(f?[\"']unisono", path.read_text(encoding="utf-8"))
    }
    assert found == {"__init__.py", "backends/__init__.py"}
