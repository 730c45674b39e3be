"""Causes in what goes into training: seeds, arguments, learning rate, data, and processes.

They explain every difference after them, so they are looked for first.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from unisono.verify.causes import Cause
from unisono.verify.compare import compare
from unisono.verify.evidence import (
    Evidence,
    as_short_text,
    assignment_site,
    callback_site,
    cause_of,
    differing_data,
    first_other_batch,
    rows_of,
    scaling_site,
    site_of_training,
    starts_differ,
)
from unisono.verify.records import ProgramRecord, RecordedCall
from unisono.verify.run import ChildRun

MADE = {
    "numpy": "makes a NumPy generator",
    "python": "makes a generator of Python's random",
}


def seed_causes(one: ProgramRecord, other: ProgramRecord, how: str) -> Iterator[Cause]:
    for mine, theirs in zip(one.random, other.random, strict=False):
        if (mine.what, mine.site) == (theirs.what, theirs.site) and mine.seed != theirs.seed:
            yield cause_of(
                "seed",
                f"the program gives {mine.what} a seed that {how}",
                f"{mine.seed}, and {theirs.seed}",
                mine.site,
            )


def seed_causes_by_rank(records: list[ProgramRecord]) -> Iterator[Cause]:
    for other in records[1:]:
        yield from seed_causes(records[0], other, "differs from process to process")
        return


def input_causes(evidence: Evidence) -> list[Cause]:
    """Arguments, hyperparameters and data that are not those of one device."""
    one, many = evidence.one.record, evidence.many.record
    found: list[Cause] = []
    rows = rows_of(one), rows_of(many)
    for mine, theirs in zip(one.calls, many.calls, strict=False):
        found += _arguments(mine, theirs, many)
    is_batch_known = any(cause.key == "global batch" for cause in found)
    if not is_batch_known and rows[0] and rows[1] and rows[0] != rows[1]:
        site = scaling_site(many) or site_of_training(many)
        seen = f"global batches of {rows[0][0]} rows, and of {rows[1][0]}"
        found.append(cause_of("global batch", "the program scales its global batch", seen, site))
    found += _optimizers(one, many)
    if any(cause.key in ("global batch", "learning rate") for cause in found):
        found = _tried_with_claim(evidence, found)
    if not found:
        found += _data(evidence)
    if not found:
        found += _attributes(one, many)
    if not found and starts_differ(one, many):
        found.append(
            Cause(
                "initial weights",
                "the model begins with other weights on replicas",
                "the variables differ before the first step",
                "Make the model in the same way for any number of replicas, after "
                "keras.utils.set_random_seed.",
                scaling_site(many) or site_of_training(many),
            )
        )
    return found


def _arguments(mine: RecordedCall, theirs: RecordedCall, many: ProgramRecord) -> Iterator[Cause]:
    if mine.name != theirs.name:
        return
    for name in {**mine.arguments, **theirs.arguments}:
        first, second = mine.arguments.get(name), theirs.arguments.get(name)
        if first == second or isinstance(first, list) or isinstance(second, list):
            continue
        key = "global batch" if name == "batch_size" else "arguments"
        what = (
            "the program scales its global batch with the number of replicas"
            if name == "batch_size"
            else f"the program gives {mine.name} another {name} on replicas"
        )
        shown = f"{name}={first!r}, and {name}={second!r}"
        scaling = scaling_site(many) if key == "global batch" else None
        if scaling is not None and theirs.site is not None:
            shown += f" in line {theirs.site.line}"
        yield cause_of(key, what, shown, scaling or theirs.site)


def _optimizers(one: ProgramRecord, many: ProgramRecord) -> Iterator[Cause]:
    for mine, theirs in zip(one.models, many.models, strict=False):
        site = theirs.optimizer_site or theirs.compile_site
        for name in {**mine.optimizer, **theirs.optimizer}:
            first, second = mine.optimizer.get(name), theirs.optimizer.get(name)
            if first == second or name == "name":
                continue
            key = "learning rate" if name == "learning_rate" else "arguments"
            what = f"the program gives the optimizer another {name.replace('_', ' ')} on replicas"
            shown = f"{name}={as_short_text(first)}, and {name}={as_short_text(second)}"
            yield cause_of(key, what, shown, site)
            return
    for number, (step, other) in enumerate(zip(one.steps, many.steps, strict=False), start=1):
        rates = step.learning_rate, other.learning_rate
        if None not in rates and not np.isclose(rates[0], rates[1], rtol=1e-4, atol=0):  # type: ignore[arg-type]
            site = many.models[other.model].optimizer_site
            yield cause_of(
                "learning rate",
                "the program changes the learning rate in another way on replicas",
                f"{rates[0]:g}, and {rates[1]:g}, at step {number}",
                callback_site(many) or site,
            )
            return


def _attributes(one: ProgramRecord, many: ProgramRecord) -> Iterator[Cause]:
    """Numbers that the program's own classes hold at the first step."""
    if not one.steps or not many.steps:
        return
    mine, theirs = one.steps[0].attributes, many.steps[0].attributes
    for name, value in mine.items():
        if name in theirs and theirs[name] != value:
            shown = name.partition(" (")[0]
            yield cause_of(
                "arguments",
                f"{shown} has another value on replicas",
                f"{as_short_text(value)}, and {as_short_text(theirs[name])}, at the first step",
                assignment_site(many, shown) or scaling_site(many) or site_of_training(many),
                is_proven=False,
            )
            return


def _tried_with_claim(evidence: Evidence, found: list[Cause]) -> list[Cause]:
    """Whether one device that is told the number of replicas gives what they give."""
    variant = replace(evidence.one.variant, claims=evidence.num_replicas)
    told = evidence.run(variant)
    agreed = None if told.has_failed else compare(told.record, evidence.many.record)
    if agreed is None or not agreed.is_same:
        return found
    shown = f"with the same, one device and replicas agree ({agreed.largest_of_all():.0e})"
    return [replace(cause, evidence=f"{cause.evidence}; {shown}") for cause in found]


def _data(evidence: Evidence) -> Iterator[Cause]:
    one, many = evidence.one.record, evidence.many.record
    arrays = differing_data(one, many)
    large = evidence.comparison.first_large()
    until = large[0].quantity.step if large else None
    batch = None if arrays else first_other_batch(one, many, until)
    if not arrays and batch is None:
        return
    shown = (
        f"{arrays[0]} has other values on replicas"
        if arrays
        else f"the global batch of step {batch} has other values on replicas"
    )
    unseeded = [use for use in many.random if use.seed is None]
    for use in unseeded:
        key = "shuffle" if use.what == "shuffle" else "unseeded data"
        what = MADE.get(use.what, "shuffles")
        yield cause_of(key, f"the program {what} without a seed", shown, use.site)
    if not unseeded:
        site = scaling_site(many) or site_of_training(many)
        yield cause_of("arguments", "the program trains on other data on replicas", shown, site)


def rank_causes(run: ChildRun) -> Iterator[Cause]:
    """What one process does and another does not."""
    records = [record for record in run.records if record.world_size > 1]
    for other in records[1:]:
        first = records[0]
        pairs = zip(first.calls, other.calls, strict=False)
        for mine, theirs in pairs:
            if mine.name != theirs.name:
                yield cause_of(
                    "one rank",
                    "the program makes other calls in one process",
                    f"rank {first.rank} calls {mine.name}, rank {other.rank} {theirs.name}",
                    mine.site,
                )
                return
        longer = max((first, other), key=lambda record: len(record.calls))
        if len(first.calls) != len(other.calls):
            extra = longer.calls[min(len(first.calls), len(other.calls))]
            yield cause_of(
                "one rank",
                f"the program calls {extra.name} in one process only",
                f"rank {longer.rank} calls it, the other does not",
                extra.site,
            )
            return
        yield from _states_by_rank(first, other)


def _states_by_rank(first: ProgramRecord, other: ProgramRecord) -> Iterator[Cause]:
    for number, (mine, theirs) in enumerate(zip(first.steps, other.steps, strict=False), start=1):
        for name, value in mine.attributes.items():
            if name in theirs.attributes and theirs.attributes[name] != value:
                shown = name.partition(" (")[0]
                yield cause_of(
                    "one rank",
                    f"the program changes {shown} in one process only",
                    f"step {number}: {as_short_text(value)} on rank {first.rank}, "
                    f"{as_short_text(theirs.attributes[name])} on rank {other.rank}",
                    assignment_site(first, shown) or site_of_training(first),
                    is_proven=False,
                )
                return
        if mine.learning_rate != theirs.learning_rate:
            yield cause_of(
                "one rank",
                "the program changes the learning rate in one process only",
                f"step {number}: {mine.learning_rate:g} on rank {first.rank}, "
                f"{theirs.learning_rate:g} on rank {other.rank}",
                callback_site(first) or site_of_training(first),
            )
            return
