"""The names that users import, pinned: adding one is a decision, losing one breaks programs."""

import importlib.metadata
import inspect
import subprocess
import sys

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
def test_every_public_function_says_what_it_promises(function):
    text = inspect.getdoc(function)
    assert text is not None
    assert text.splitlines()[0].endswith((".", ";", ","))
    assert ">>> " in text
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


@pytest.mark.parametrize("name", [name for name in PUBLIC[unisono] if name.endswith("Error")])
def test_errors_are_documented(name):
    assert inspect.getdoc(getattr(unisono, name))


def test_the_version_is_that_of_the_package():
    assert [int(part) for part in unisono.__version__.split(".")] >= [0, 1, 0]


@pytest.mark.parametrize("name", ["callbacks.DeviceStats", "compat.multi_gpu_model", "schedules"])
def test_rooms_are_there_by_their_names(name):
    """Without an import of their own, and without Keras before one is asked for."""
    program = "import sys, unisono; assert 'keras' not in sys.modules; "
    done = subprocess.run([sys.executable, "-c", program + f"unisono.{name}"], check=False)
    assert done.returncode == 0
    with pytest.raises(AttributeError, match="has no attribute 'rooms'"):
        _ = unisono.rooms


def test_errors_exported_by_earlier_releases_are_deprecated():
    with pytest.warns(DeprecationWarning, match=r"use unisono\.errors\.ConfigurationError"):
        old = unisono.SettingError
    assert old is unisono.ConfigurationError
    with pytest.warns(DeprecationWarning, match=r"use unisono\.errors\.PeerLostError"):
        assert issubclass(unisono.PeerLostError, unisono.WorkerError)
