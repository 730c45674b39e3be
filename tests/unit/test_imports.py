"""Work that waits for an import: when it is done, in which order, and what a program sees of it."""

import importlib
import importlib.util
import sys

import pytest

from unisono.imports import after_import

NAME = "framework_for_a_test"


@pytest.fixture
def module(monkeypatch, tmp_path):
    """A module that can be imported and has not been."""
    (tmp_path / f"{NAME}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield NAME
    sys.modules.pop(NAME, None)


def test_actions_are_done_once_in_order_on_the_complete_module(module):
    seen = []
    finders = list(sys.meta_path)
    after_import(module, lambda found: seen.append(("first", found.value)))
    after_import(module, lambda found: seen.append(("second", found.value)))
    assert len(sys.meta_path) == len(finders) + 1
    assert importlib.util.find_spec(module) is not None
    assert seen == []
    imported = importlib.import_module(module)
    assert seen == [("first", 1), ("second", 1)]
    assert sys.meta_path == finders
    importlib.reload(imported)
    assert len(seen) == 2


def test_the_module_shows_its_own_loader(module):
    plain = type(importlib.util.find_spec(module).loader)
    after_import(module, lambda found: None)
    imported = importlib.import_module(module)
    assert type(imported.__loader__) is type(imported.__spec__.loader) is plain


def test_it_is_now_where_the_module_is_imported():
    seen = []
    after_import("importlib", seen.append)
    assert seen == [importlib]


def test_an_error_reaches_who_imports(module):
    def refuse(found):
        raise ValueError("not this one")

    after_import(module, refuse)
    with pytest.raises(ValueError, match="not this one"):
        importlib.import_module(module)
