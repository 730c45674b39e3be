"""A framework that is newer than those tested is refused, unless a variable says otherwise."""

import sys

import keras
import pytest
from twins import BACKEND, mlp

import unisono
from unisono.errors import VersionError


@pytest.fixture(params=["keras", BACKEND])
def newer(request, monkeypatch) -> str:
    """The name of a framework that seems newer than any."""
    monkeypatch.delenv("UNISONO_ANY_VERSION", raising=False)
    for name in ("keras", BACKEND):  # Where the tests themselves try a newer one.
        monkeypatch.setattr(sys.modules[name], "__version__", "0.1.0")
    monkeypatch.setattr(sys.modules[request.param], "__version__", "99.1.0")
    return str(request.param)


def test_a_newer_framework_is_refused(newer):
    with pytest.raises(VersionError, match=f"Found {newer} 99.1.0; .*UNISONO_ANY_VERSION"):
        unisono.parallel(mlp(), replicas=2)
    with pytest.raises(VersionError, match=newer):
        unisono.Strategy(replicas=2)


def test_a_variable_overrides_it(newer, monkeypatch):
    monkeypatch.setenv("UNISONO_ANY_VERSION", "1")
    assert isinstance(unisono.parallel(mlp(), replicas=2), keras.Model)


def test_these_versions_are_not_refused(monkeypatch):
    monkeypatch.setattr(keras, "__version__", "3.15.99")
    assert isinstance(unisono.parallel(mlp(), replicas=2), keras.Model)
