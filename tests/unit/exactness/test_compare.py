"""How two runs of a case are compared."""

import math

import numpy as np
import pytest

from exactness.compare import distance, flatten, largest_deviation


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
