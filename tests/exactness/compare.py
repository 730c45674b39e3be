"""The largest deviation between two runs of a case, and where it is."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Deviation:
    """How far apart two runs are: `value` is relative to max(1, |expected|)."""

    value: float
    where: str


def largest_deviation(expected: Any, actual: Any) -> Deviation:
    """Compare two nested results; a missing key, another shape or a lone NaN is infinitely far."""
    wanted, found = dict(flatten(expected)), dict(flatten(actual))
    if wanted.keys() != found.keys():
        return Deviation(np.inf, f"only one run has {sorted(wanted.keys() ^ found.keys())}")
    each = (Deviation(distance(wanted[key], found[key]), key) for key in wanted)
    return max(each, key=lambda deviation: deviation.value, default=Deviation(0.0, "nothing"))


def flatten(results: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for every leaf of nested dicts, lists and tuples."""
    if isinstance(results, Mapping):
        for key in results:
            yield from flatten(results[key], f"{path}/{key}" if path else str(key))
    elif isinstance(results, (list, tuple)):
        for index, value in enumerate(results):
            yield from flatten(value, f"{path}[{index}]")
    else:
        yield path, results


def distance(expected: Any, actual: Any) -> float:
    """The largest deviation of two leaves, elements that are NaN in both counting as equal."""
    if not is_number(expected) or not is_number(actual):
        return 0.0 if type(expected) is type(actual) and expected == actual else np.inf
    a = np.asarray(expected, dtype=np.float64)
    b = np.asarray(actual, dtype=np.float64)
    if a.shape != b.shape:
        return np.inf
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(a - b) / np.maximum(1.0, np.abs(a))
    apart = np.where(np.isnan(apart), np.inf, apart)
    return float(np.max(np.where(same, 0.0, apart), initial=0.0))


def is_number(leaf: Any) -> bool:
    return isinstance(leaf, (bool, int, float, np.ndarray, np.generic))
