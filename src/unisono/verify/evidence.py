"""The runs that a diagnosis has, and what can be looked up in their records."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono.verify import source
from unisono.verify.causes import REMEDIES, Cause
from unisono.verify.compare import Comparison, compare
from unisono.verify.records import ModelFacts, ProgramRecord, Site
from unisono.verify.run import ChildRun, Variant

_REPLICA_NAMES = {"num_replicas_in_sync", "num_replicas", "world_size", "local_size"}


@dataclass
class Evidence:
    """The runs that were made, and a way to make another."""

    one: ChildRun
    again: ChildRun
    many: ChildRun
    noise: Comparison
    comparison: Comparison
    rounding: Comparison | None
    run: Callable[[Variant], ChildRun]

    @property
    def num_replicas(self) -> int:
        return self.many.variant.num_replicas

    def agrees_with(self, other: ChildRun, one: ChildRun | None = None) -> Comparison | None:
        """The comparison with a further run, if that agrees; None where it does not."""
        if other.has_failed:
            return None
        base = (one or self.one).record
        found = compare(base, other.record, noise=self.noise, rounding=self.rounding)
        return found if found.is_same else None


def cause_of(
    key: str, what: str, evidence: str, site: Site | None, *, is_proven: bool = True
) -> Cause:
    return Cause(key, what, evidence, REMEDIES[key], site, is_proven)


def trained_models(record: ProgramRecord) -> list[ModelFacts]:
    parts = [part for step in record.steps for part in (step, *step.others)]
    return [record.models[i] for i in dict.fromkeys(p.model for p in parts) if i >= 0]


def rows_of(record: ProgramRecord) -> list[int]:
    return [step.num_rows for step in record.steps if step.num_rows]


def differing_data(one: ProgramRecord, other: ProgramRecord) -> list[str]:
    """Arguments that are arrays and have other values, in words."""
    found = []
    for mine, theirs in zip(one.calls, other.calls, strict=False):
        for name in ("x", "y", "sample_weight", "validation_data"):
            first, second = mine.arguments.get(name), theirs.arguments.get(name)
            if isinstance(first, list) and first[0] == "array" and first != second:
                found.append(f"{name} of {mine.name}")
    return found


def first_other_batch(
    one: ProgramRecord, other: ProgramRecord, until: int | None = None
) -> int | None:
    """The first step whose batch differs; `until`: later ones are a consequence.

    Replicas draw fewer random numbers than one device from the generator that shuffles the next
    epoch.
    """
    done = 0
    for mine, theirs in zip(one.steps, other.steps, strict=False):
        done += mine.num_steps
        if until is not None and done > until:
            return None
        if None not in (mine.data, theirs.data) and mine.data != theirs.data:
            return done
    return None


def starts_differ(one: ProgramRecord, other: ProgramRecord) -> bool:
    for mine, theirs in zip(one.models, other.models, strict=False):
        if mine.is_built_late or theirs.is_built_late:
            continue
        pairs = zip(mine.start, theirs.start, strict=False)
        if any(not np.array_equal(a, b, equal_nan=True) for a, b in pairs):
            return True
    return False


def site_of_training(record: ProgramRecord) -> Site | None:
    sites = [call.site for call in record.calls if call.name in ("fit", "train_on_batch")]
    found = [site for site in [*sites, *record.loop_sites] if site is not None]
    return found[0] if found else None


def scaling_site(record: ProgramRecord) -> Site | None:
    return next(source.mentions(record.files, _REPLICA_NAMES), None)


def as_short_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def assignment_site(record: ProgramRecord, name: str) -> Site | None:
    """Where an attribute `Class.name` is assigned."""
    return next(source.assignments(record.files, name.rpartition(".")[2]), None)


def callback_site(record: ProgramRecord) -> Site | None:
    return next(source.mentions(record.files, {"learning_rate"}), None)


def first_difference(evidence: Evidence) -> str:
    first = evidence.comparison.first_large()
    if not first:
        return "; ".join(evidence.comparison.structure)
    quantity = first[0].quantity
    return f"{quantity.name} differs first, at step {quantity.step} (by {first[0].value:.0e})"
