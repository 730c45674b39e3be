"""`import unisono` has no effect besides names; actions after an import run once, in order."""

import importlib
import importlib.util
import json
import os
import resource
import statistics
import subprocess
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


# -- import unisono -------------------------------------------------------------------------------

EFFECTS = """
import os, sys, threading
writes = []

def note(event, args):
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
        writes.append(str(args[0]))
    elif event in ("os.mkdir", "os.remove", "os.rename", "subprocess.Popen", "socket.connect"):
        writes.append(f"{event} {args}")

sys.addaudithook(note)
before = dict(os.environ)
import unisono
import json
frameworks = {"keras", "jax", "tensorflow", "torch", "numpy", "ctypes"} & {*sys.modules}
print(json.dumps([writes, threading.active_count(), sorted(frameworks), before == os.environ]))
"""


@pytest.mark.parametrize("backend", ["jax", "tensorflow", "torch"])
def test_importing_has_no_effect_besides_names(backend, tmp_path):
    """No file, thread, connection or allocator call (which takes ctypes), and no framework."""
    env = {**os.environ, "KERAS_BACKEND": backend, "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    words = [sys.executable, "-B", "-c", EFFECTS]
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[], 1, [], True]
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_importing_takes_less_than_a_fifth_of_a_second():
    """In processor time, which does not depend on what else the machine does."""

    def seconds(program):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", program], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    bare, ours = (
        statistics.median(seconds(program) for _ in range(5)) for program in ("", "import unisono")
    )
    assert ours - bare < 0.2
