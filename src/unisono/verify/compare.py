"""The difference between two records, quantity by quantity, and what of it is rounding.

Differences are those of docs/exactness.md: absolute for values up to one, relative above. In
float32 they may reach 1e-5, as the contract says; half precision has its own limits. Two things
raise a limit, for one quantity at a time: what two runs of one device differ by, and what changes
when the last bits of the initial weights are changed, because some nets amplify rounding.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from unisono.verify.records import ProgramRecord

KINDS = ("weights", "optimizer", "loss", "metrics", "evaluate", "predict")
CONTRACT = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
MOST_NOISE = 100.0
"""How many times the contract's limit two runs of one device may differ and be compared at all."""
_TIMES_NOISE = 10.0
_TIMES_ROUNDING = 10.0
_FLIPS_AT_ROUNDING, _FLIPS_AT_AMPLIFIED = 1, 3
_CALL_ORDER = 3


class Quantity(NamedTuple):
    """Something that both runs have recorded."""

    step: int
    """Optimizer steps made before it was recorded; at the end, and for calls, all so far."""
    order: int
    """Within a step: what is computed first comes first."""
    kind: str
    name: str
    model: int
    place: int = 0
    """Which call, or which variable."""


@dataclass(frozen=True)
class Difference:
    """How far apart a quantity is, and how far it may be."""

    quantity: Quantity
    value: float
    limit: float

    @property
    def is_large(self) -> bool:
        return not self.value <= self.limit


@dataclass
class Comparison:
    """All quantities of two runs."""

    differences: list[Difference] = field(default_factory=list)
    structure: list[str] = field(default_factory=list)
    """What only one of the runs has, or what has another shape, in words."""

    @property
    def is_same(self) -> bool:
        return not self.structure and not any(d.is_large for d in self.differences)

    def largest(self, kind: str) -> Difference | None:
        found = [d for d in self.differences if d.quantity.kind == kind]
        return max(found, key=lambda d: _sortable(d.value), default=None)

    def largest_of_all(self) -> float:
        return max((_sortable(d.value) for d in self.differences), default=0.0)

    def first_large(self) -> list[Difference]:
        """The large differences of the first moment that has any, the largest first."""
        large = [d for d in self.differences if d.is_large]
        if not large:
            return []
        first = min(d.quantity[:2] for d in large)
        found = [d for d in large if d.quantity[:2] == first]
        return sorted(found, key=lambda d: -_sortable(d.value))

    def large_by_layer(self) -> list[tuple[str, float]]:
        """Layers whose weights differ at the end, the largest first."""
        layers: dict[str, float] = {}
        for d in self.differences:
            if d.is_large and d.quantity.kind == "weights":
                layer = d.quantity.name.rpartition("/")[0] or d.quantity.name
                layers[layer] = max(layers.get(layer, 0.0), _sortable(d.value))
        return sorted(layers.items(), key=lambda entry: -entry[1])


def compare(
    one: ProgramRecord,
    other: ProgramRecord,
    *,
    noise: "Comparison | None" = None,
    rounding: "Comparison | None" = None,
) -> Comparison:
    """Compare two runs; `noise` and `rounding` are comparisons of runs on one device."""
    limits = [CONTRACT[model.dtype] for model in one.models] or [CONTRACT["float32"]]
    raised = _raised(noise, _TIMES_NOISE) | {}
    for quantity, value in _raised(rounding, _TIMES_ROUNDING).items():
        raised[quantity] = max(value, raised.get(quantity, 0.0))
    other = _with_names_of(one, other)
    first, second = quantities(one), quantities(other)
    result = Comparison(structure=_structure(one, other))
    fractions = {
        quantity
        for quantity, value in first.items()
        if quantity in second and _is_fraction(value) and _is_fraction(second[quantity])
    }
    for quantity, value in first.items():
        if quantity in second:
            limit = max(limits[max(quantity.model, 0)], raised.get(quantity, 0.0))
            result.differences.append(
                Difference(quantity, deviation(value, second[quantity]), limit)
            )
    return _with_flips(result, one, fractions)


def _with_names_of(one: ProgramRecord, other: ProgramRecord) -> ProgramRecord:
    """The other record with the names of the first, where its variables are the same in number.

    Their paths depend on when a subclassed model is built, which replicas do before a step.
    """
    models = [
        dataclasses.replace(theirs, variables=mine.variables)
        if list(map(np.shape, mine.weights)) == list(map(np.shape, theirs.weights))
        else theirs
        for mine, theirs in zip(one.models, other.models, strict=False)
    ]
    return dataclasses.replace(other, models=[*models, *other.models[len(models) :]])


def _is_fraction(value: Any) -> bool:
    return bool(np.all((np.asarray(value) >= 0) & (np.asarray(value) <= 1)))


def _with_flips(
    comparison: Comparison, record: ProgramRecord, fractions: set[Quantity]
) -> Comparison:
    """Allow for a few rows that rounding puts on the other side of a decision, as in accuracy.

    Only where all that is continuous agrees: weights, optimizer state, losses, predictions, and
    metrics that are no fraction of the rows.
    """
    large = [d for d in comparison.differences if d.is_large]
    if not large or any(not (_is_count(d.quantity) and d.quantity in fractions) for d in large):
        return comparison
    flips = _FLIPS_AT_ROUNDING
    weights = comparison.largest("weights")
    if weights is not None and weights.value > CONTRACT["float32"]:
        flips = _FLIPS_AT_AMPLIFIED
    found = []
    for d in comparison.differences:
        if d.is_large:
            limit = max(d.limit, (flips + 0.01) / _num_rows(d.quantity, record))
            d = dataclasses.replace(d, limit=limit)
        found.append(d)
    return dataclasses.replace(comparison, differences=found)


def _is_count(quantity: Quantity) -> bool:
    """Whether a metric may be a mean of decisions."""
    return quantity.kind in ("metrics", "evaluate") and not quantity.name.endswith("loss")


def _num_rows(quantity: Quantity, record: ProgramRecord) -> int:
    """The fewest rows that a metric can be of."""
    call = record.calls[quantity.place] if quantity.place < len(record.calls) else None
    if quantity.order == _CALL_ORDER and call is not None and call.name != "fit":
        x = call.arguments.get("x")
        if isinstance(x, list) and x[0] == "array" and x[1] and x[1][0]:
            return int(x[1][0][0]) or 1
    sizes = [step.num_rows for step in record.steps if step.num_rows]
    sizes += [n for c in record.calls if isinstance(n := c.arguments.get("batch_size"), int)]
    return min(sizes, default=32)


def _raised(comparison: Comparison | None, times: float) -> dict[Quantity, float]:
    """Limits by what a quantity, or an earlier value of it, differed by on one device."""
    if comparison is None:
        return {}
    found: dict[Quantity, float] = {}
    so_far: dict[tuple[Any, ...], float] = {}
    for d in sorted(comparison.differences, key=lambda d: d.quantity):
        key = d.quantity[2:]
        so_far[key] = max(so_far.get(key, 0.0), times * _sortable(d.value))
        found[d.quantity] = so_far[key]
    return found


def quantities(record: ProgramRecord) -> dict[Quantity, Any]:
    """What a record has that can be compared, by what it is."""
    found: dict[Quantity, Any] = {}
    done = 0
    for step in record.steps:
        done += step.num_steps
        for name, value in step.logs.items():
            kind = "loss" if name.endswith("loss") else "metrics"
            found[Quantity(done, 0, kind, name, step.model)] = np.asarray(value)
        for name, values in step.program.items():
            names = [name] if len(values) == 1 else [f"{name}[{i}]" for i in range(len(values))]
            kind = "loss" if "loss" in name and np.size(values[0]) == 1 else "weights"
            _add(found, done, kind, names, values, step.model)
        for part in (step, *step.others):
            if part.model >= 0:
                model = record.models[part.model]
                _add(found, done, "weights", model.variables, part.weights, part.model)
                slots = model.optimizer_variables
                _add(found, done, "optimizer", slots, part.optimizer, part.model)
    ends = [*(call.first_step for call in record.calls[1:]), len(record.steps)]
    totals = np.cumsum([0, *(step.num_steps for step in record.steps)])
    for place, (call, end) in enumerate(zip(record.calls, ends, strict=False)):
        kind = call.name.partition("_")[0].replace("test", "evaluate")
        for name, value in call.results.items():
            what = kind if kind in KINDS else "loss" if name.endswith("loss") else "metrics"
            key = Quantity(int(totals[end]), _CALL_ORDER, what, name, call.model, place)
            found[key] = np.asarray(value)
    for index, model in enumerate(record.models):
        _add(found, done, "weights", model.variables, model.weights, index, order=4)
        _add(found, done, "optimizer", model.optimizer_variables, model.optimizer_state, index, 4)
    return found


def _add(
    found: dict[Quantity, Any],
    step: int,
    kind: str,
    names: Iterable[str],
    values: Iterable[Any],
    model: int,
    order: int | None = None,
) -> None:
    order = {"loss": 0, "weights": 1}.get(kind, 2) if order is None else order
    for place, (name, value) in enumerate(zip(names, values, strict=False)):
        found[Quantity(step, order, kind, name, model, place)] = value


def deviation(one: Any, other: Any) -> float:
    """The largest difference of two arrays, relative where values are above one."""
    a, b = np.asarray(one, "float64"), np.asarray(other, "float64")
    if a.shape != b.shape:
        return float("inf")
    if not a.size:
        return 0.0
    is_same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        found = np.where(is_same, 0.0, np.abs(a - b) / np.maximum(1.0, np.abs(a)))
    return float(np.nan_to_num(found, nan=np.inf).max())


def _structure(one: ProgramRecord, other: ProgramRecord) -> list[str]:
    found = []
    if one.num_steps != other.num_steps:
        found.append(f"{one.num_steps} optimizer steps, and {other.num_steps}")
    names = [[call.name for call in record.calls] for record in (one, other)]
    if names[0] != names[1]:
        found.append(f"calls {_shortened(names[0])}, and {_shortened(names[1])}")
    for mine, theirs in zip(one.models, other.models, strict=False):
        if mine.variables != theirs.variables:
            found.append(
                f"{mine.name} with {len(mine.variables)} variables, and {len(theirs.variables)}"
            )
    return found


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") or "none"


def _sortable(value: float) -> float:
    return float("inf") if np.isnan(value) else value


def as_plain(comparison: Comparison) -> Mapping[str, Any]:
    """For JSON."""
    return {
        kind: None if (found := comparison.largest(kind)) is None else found.value for kind in KINDS
    }
