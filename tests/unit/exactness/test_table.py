"""The exactness table: how runs are compared, its Markdown, and the command that measures it."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import stand_in_measure

from exactness.__main__ import measure_backend, merged
from exactness.results import (
    MARKER,
    Cell,
    distance,
    entry,
    flatten,
    largest_deviation,
    number,
    read_cells,
    render,
    write_cells,
    write_into,
)


@pytest.mark.parametrize(
    ("expected", "actual", "apart"),
    [
        (1.0, 1.0, 0.0),
        (0.5, 0.25, 0.25),
        (-100.0, -101.0, 0.01),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0),
        ([math.nan, 1.0], [0.0, 1.0], math.inf),
        ([math.inf], [math.inf], 0.0),
        ([math.inf], [1.0], math.inf),
        ([1.0, 2.0], [1.0], math.inf),
        ([], [], 0.0),
    ],
)
def test_distance_of_numbers(expected, actual, apart):
    assert distance(np.asarray(expected), np.asarray(actual)) == pytest.approx(apart)


def test_distance_of_other_leaves_is_all_or_nothing():
    assert distance("epoch ends", "epoch ends") == 0.0
    assert distance(None, None) == 0.0
    assert distance("epoch ends", "epoch begins") == math.inf
    assert distance(None, 1.0) == math.inf


def test_largest_deviation_says_where():
    expected = {"weights": [np.zeros(2), np.zeros(3)], "loss": 1.0}
    actual = {"weights": [np.zeros(2), np.array([0.0, 0.5, 0.0])], "loss": 1.1}
    found = largest_deviation(expected, actual)
    assert (found.value, found.where) == (0.5, "weights[1]")


def test_a_missing_result_is_infinitely_far():
    found = largest_deviation({"loss": 1.0, "val_loss": 1.0}, {"loss": 1.0})
    assert found.value == math.inf
    assert "val_loss" in found.where


def test_flatten_names_every_leaf():
    nested = {"a": [1, {"b": 2}], "c": (3,)}
    assert dict(flatten(nested)) == {"a[0]": 1, "a[1]/b": 2, "c[0]": 3}


def cell(backend="jax", replicas=2, case="adam", position=0, **found):
    facts = {"group": "Optimizers", "title": case.title(), "tolerance": 1e-5}
    found = found or {"deviation": 3.2e-8}
    return Cell(backend, replicas, case, position, **{**facts, **found})


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (3.2e-8, "3e-8"), (1e-5, "1e-5"), (math.inf, "inf"), (2.0, "2e0")],
)
def test_number(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("found", "text", "failed"),
    [
        ({"deviation": 3.2e-8}, "3e-8", False),
        ({"deviation": 2e-5}, "**2e-5**", True),
        ({"deviation": math.nan}, "**nan**", True),
        ({"skipped": "Keras refuses it"}, "—", False),
        ({"error": "ValueError: no"}, "**error**", True),
    ],
)
def test_entry(found, text, failed):
    assert entry(cell(**found)) == text
    assert cell(**found).failed is failed


def test_table_has_a_row_for_each_case_and_a_column_for_each_backend_and_replicas():
    cells = [
        cell(),
        cell("torch", 4, deviation=1e-7),
        cell("torch", 4, "sgd", 1, skipped="Keras refuses it"),
        cell("jax", 2, "sgd", 1, error="ValueError: no\nmore"),
    ]
    text = render(cells)
    assert "| Optimizers | JAX 2 | torch 4 |" in text
    assert "| Adam | 3e-8 | 1e-7 |" in text
    assert "| Sgd | **error** | — |" in text
    assert "- Sgd on torch: Keras refuses it." in text
    assert "- sgd (JAX, 2 replicas): ValueError: no\n" in text
    assert "| cases held to 1e-5 | 3e-8 | 1e-7 |" in text


def test_cells_survive_a_file_with_a_torn_last_line(tmp_path):
    path = tmp_path / "cells.jsonl"
    write_cells(path, [cell(), cell(replicas=3)])
    path.write_text(path.read_text() + '{"backend": "ja')
    assert read_cells(path) == [cell(), cell(replicas=3)]


def test_later_cells_win_and_keep_the_order_of_the_table():
    kept = [cell("jax", 2, "sgd", 1), cell(deviation=1e-6)]
    new = [cell(deviation=1e-7)]
    assert [(c.case, c.deviation) for c in merged(kept, new)] == [("adam", 1e-7), ("sgd", 3.2e-8)]


def test_table_replaces_what_stands_between_the_markers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{MARKER}\nold\n{MARKER}\nafter\n")
    write_into(page, "new\n")
    write_into(page, "newer\n")
    assert page.read_text() == f"before\n{MARKER}\n\nnewer\n\n{MARKER}\nafter\n"


def test_a_page_without_markers_is_left_alone(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n")
    with pytest.raises(ValueError, match="Put two of them"):
        write_into(page, "new\n")
    assert page.read_text() == "text\n"


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
