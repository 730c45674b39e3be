"""The exactness table in Markdown, and the document that it is written into."""

import math

import pytest

from exactness.__main__ import merged
from exactness.cell import Cell, read_cells, write_cells
from exactness.table import MARKER, entry, number, render, write_into


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
