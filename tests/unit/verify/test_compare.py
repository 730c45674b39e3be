"""What counts as a difference: the contract's limits, and what raises them."""

import dataclasses

import numpy as np
import pytest

from unisono.verify.compare import compare, deviation
from unisono.verify.records import ModelFacts, ProgramRecord, RecordedCall, Step


def record(weights, loss=1.0, accuracy=0.5, num_rows=32) -> ProgramRecord:
    model = ModelFacts("net", "Sequential", variables=["net/dense/kernel", "net/dense/bias"])
    model.weights = [np.asarray(w, "float32") for w in weights]
    step = Step(0, logs={"loss": loss, "accuracy": accuracy}, num_rows=num_rows)
    step.weights = model.weights
    return ProgramRecord(models=[model], steps=[step])


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1.0, 0.5], [1.0, 0.25], 0.25),
        ([100.0], [101.0], 0.01),
        ([np.nan], [np.nan], 0.0),
        ([np.inf], [np.inf], 0.0),
        ([np.nan], [1.0], np.inf),
        ([1.0], [1.0, 2.0], np.inf),
        ([], [], 0.0),
    ],
)
def test_differences_are_relative_above_one(one, other, expected):
    assert deviation(np.array(one), np.array(other)) == pytest.approx(expected)


def test_the_first_difference_is_of_the_first_step_and_layer():
    found = compare(record([[1.0], [0.1]]), record([[1.0], [0.2]], loss=1.0))
    first = found.first_large()[0]
    assert (first.quantity.step, first.quantity.name) == (1, "net/dense/bias")
    assert found.large_by_layer() == [("net/dense", pytest.approx(0.1))]


def test_rounding_raises_the_limit_of_the_quantity_that_it_moves():
    one, many = record([[1.0], [0.1]]), record([[1.0], [0.1005]])
    moved = compare(one, record([[1.0], [0.1001]]))
    assert not compare(one, many).is_same
    assert compare(one, many, rounding=moved).is_same
    assert not compare(one, record([[1.0005], [0.1]]), rounding=moved).is_same


@pytest.mark.parametrize(("accuracy", "is_same"), [(0.5 + 1 / 32, True), (0.5 + 3 / 32, False)])
def test_a_row_may_change_sides_where_all_else_agrees(accuracy, is_same):
    one = record([[1.0], [0.1]])
    assert compare(one, record([[1.0], [0.1]], accuracy=accuracy)).is_same == is_same
    assert not compare(one, record([[1.0], [0.2]], accuracy=accuracy)).is_same


def test_a_metric_that_is_no_fraction_of_the_rows_must_agree():
    one = record([[1.0], [0.1]], accuracy=2.03)
    assert not compare(one, record([[1.0], [0.1]], accuracy=2.01)).is_same


def test_variables_may_have_other_paths():
    one, other = record([[1.0], [0.1]]), record([[1.0], [0.1]])
    other.models[0] = dataclasses.replace(other.models[0], variables=["kernel", "bias"])
    found = compare(one, other)
    assert found.is_same
    assert found.largest("weights") is not None
    assert not compare(one, record([[1.0], [0.2]])).is_same


def test_half_precision_has_its_own_limit():
    one, other = record([[1.0], [0.1]]), record([[1.0], [0.101]])
    assert not compare(one, other).is_same
    one.models[0] = dataclasses.replace(one.models[0], dtype="float16")
    assert compare(one, other).is_same


def test_other_calls_and_steps_are_differences():
    one, other = record([[1.0], [0.1]]), record([[1.0], [0.1]])
    other.calls.append(RecordedCall("evaluate", 0, None))
    other.steps.append(other.steps[0])
    found = compare(one, other)
    assert found.structure == [
        "1 optimizer steps, and 2",
        "calls none, and evaluate",
    ]
    assert not found.is_same
