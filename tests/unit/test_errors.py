"""The tree of exceptions, as its docstring draws it and as users catch it."""

import pickle
import re

import pytest

from unisono import errors
from unisono.errors import (
    ConfigurationError,
    DataError,
    DeviceError,
    DisagreementError,
    LaunchError,
    LegacyError,
    LegacyImportError,
    ModelError,
    OutputError,
    PeerLostError,
    Preempted,
    StartedError,
    StrategyError,
    UnisonoError,
    VersionError,
    WorkerError,
)

TREE = [
    (ConfigurationError, ValueError),
    (DeviceError, ValueError),
    (StartedError, RuntimeError),
    (VersionError, RuntimeError),
    (StrategyError, RuntimeError),
    (LegacyError, RuntimeError),
    (LegacyImportError, ImportError),
    (ModelError, TypeError),
    (DataError, ValueError),
    (LaunchError, RuntimeError),
    (WorkerError, RuntimeError),
    (PeerLostError, RuntimeError),
    (DisagreementError, RuntimeError),
    (OutputError, OSError),
]


@pytest.mark.parametrize(("error", "builtin"), TREE)
def test_each_error_is_ours_and_the_builtin_one(error, builtin):
    assert issubclass(error, UnisonoError)
    assert issubclass(error, builtin)
    with pytest.raises(builtin, match="asked, found, do"):
        raise error("asked, found, do")


def test_the_docstring_draws_every_error():
    drawn = re.findall(r"── (\w+) \((\w+)\)", errors.__doc__ or "")
    assert drawn == [(error.__name__, builtin.__name__) for error, builtin in TREE]
    defined = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    assert defined == {UnisonoError, Preempted, *(error for error, _ in TREE)}


def test_a_preemption_ends_the_program_and_is_no_error():
    assert issubclass(Preempted, SystemExit)
    assert not issubclass(Preempted, Exception)
    assert Preempted().code == 75


@pytest.mark.parametrize("error", [error for error, _ in TREE])
def test_errors_cross_processes(error):
    copy = pickle.loads(pickle.dumps(error("as it was")))
    assert type(copy) is error
    assert copy.args == ("as it was",)
    assert error.__doc__
