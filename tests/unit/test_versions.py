"""A process of a run refuses an untested Keras as soon as it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

STAND_IN = """
__version__ = "99.1.0"
class backend:
    backend = staticmethod(lambda: "jax")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program beside a package that only says that it is a newer Keras."""
    (tmp_path / "keras.py").write_text(STAND_IN)
    script = tmp_path / "script.py"
    script.write_text("import unisono\nimport keras\nprint('went on')\n")
    return script


def test_a_run_ends_with_the_reason(program):
    env = {name: value for name, value in os.environ.items() if not name.startswith("UNISONO_")}
    env["PYTHONPATH"] = str(program.parent)
    command = [sys.executable, "-m", "unisono", "run", "--replicas", "2", str(program)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "went on" not in done.stdout
    assert "VersionError: Found keras 99.1.0" in done.stdout + done.stderr
    assert "UNISONO_ANY_VERSION=1" in done.stdout + done.stderr
