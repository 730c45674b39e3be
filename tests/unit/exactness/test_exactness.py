"""The command that measures the table goes on after cases that end or block their process."""

import sys
from pathlib import Path

import pytest
import stand_in_measure

from exactness.__main__ import measure_backend

STAND_IN = [sys.executable, str(Path(stand_in_measure.__file__))]


def test_each_failure_becomes_a_visible_cell(tmp_path, capsys):
    cells = measure_backend("jax", STAND_IN, folder=tmp_path, timeout_s=6)
    assert [(cell.case, cell.deviation, cell.error) for cell in cells] == [
        ("good", 1e-7, None),
        ("deadly", None, "ended with code 3"),
        ("blocking", None, "gave no result within 6 s"),
        ("last", 1e-7, None),
    ]
    assert [cell.failed for cell in cells] == [False, True, True, False]
    assert "JAX 2: good: 1.0e-07" in capsys.readouterr().out


def test_a_process_that_never_starts_is_an_error(tmp_path):
    broken = [sys.executable, "-c", "raise SystemExit(2)"]
    with pytest.raises(RuntimeError, match="ended with code 2 before its first case"):
        measure_backend("jax", broken, folder=tmp_path, timeout_s=60)
