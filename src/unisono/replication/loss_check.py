"""Find out, once per compiled model, whether what a step minimizes and reports are means or sums.

A step is tried on a few rows of the first batch, by a replica that has a twin with the same rows,
and on these rows twice, by a replica that is alone. Both must come to the same gradients and
reports. If those of the rows twice are twice as large, what the step minimizes is a sum. Then it is
tried on different rows, by each of two replicas and by one: a mean over unmasked entries does not
change when rows are doubled, but it is not the mean of the replicas' means.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from unisono.keras_internals import layers_of
from unisono.launch.client import current_world
from unisono.replication.loss_kinds import (
    MEAN,
    NEITHER,
    SUM,
    KnownKinds,
    LossKinds,
    adding_layers,
    all_optimizers_of,
    targets_of,
)
from unisono.replication.loss_trials import (
    BOTH,
    FIRST,
    SECOND,
    TWICE,
    TWIN,
    Draws,
    Gathers,
    TrialRows,
    restored,
    with_moving_statistics,
)
from unisono.replication.step import StepState, Trial

_MOST_ROWS = 8
# Far from both: what is neither by less than this is rounding.
_TOLERANCE, _TOLERANCE_HALF = 2e-3, 5e-2

TryStep = Callable[[TrialRows, Gathers, StepState], None]
"""Runs a step on some rows by one replica, which gathers by `Gathers`; with this state."""


def find_kinds(model: keras.Model, name: str, num_rows: int, try_step: TryStep) -> LossKinds:
    """What the losses of a model's `train_step` or `test_step` are; warns of what is neither.

    `num_rows`: of the batch whose first rows are tried.
    """
    try:
        return _find_kinds(model, name, num_rows, try_step)
    except Exception as error:  # Whatever a user's step does: if it fails there, it says so itself.
        _warn(
            model,
            f"{name} could not be tried on a few rows of the first batch, so whether its loss is "
            f"a mean or a sum over rows is unknown ({type(error).__name__}: {error})",
        )
        return LossKinds()


def _find_kinds(model: keras.Model, name: str, num_rows: int, try_step: TryStep) -> LossKinds:
    # Twice as many fit into memory wherever the batch does.
    draws, gathers = Draws(), Gathers(max(1, min(_MOST_ROWS, num_rows // 2)))

    def tried(rows: TrialRows, kinds: LossKinds) -> Trial:
        state = StepState(kinds=KnownKinds(model, kinds), trial=Trial())
        statistics = with_moving_statistics(model) if rows.is_split else nullcontext()
        with restored(model), draws.repeated(), gathers.of(rows), statistics:
            try_step(rows, gathers, state)
        assert state.trial is not None
        return state.trial

    if not all(layer.built for layer in layers_of(model)):
        # What a step builds must not be drawn alike in every row.
        with restored(model), gathers.of(TWICE):
            try_step(TWICE, gathers, StepState(kinds=KnownKinds(model, LossKinds()), trial=Trial()))
    part, whole = tried(TWIN, LossKinds()), tried(TWICE, LossKinds())
    judge = _Judge(model, whole)
    first = judge.kinds(part, MEAN)
    added = {id(layer) for layer in adding_layers(model)}
    found = first
    for base in (MEAN, SUM):
        # Terms that are known by themselves are scaled to fit the base: is the rest of that kind?
        terms = [
            kinds if id(target) in added else []
            for target, kinds in zip(targets_of(model), first.targets, strict=True)
        ]
        is_tried = base == MEAN and not any(SUM in kinds for kinds in terms)
        trial = part if is_tried else tried(TWIN, LossKinds(base, terms))
        candidate = judge.kinds(trial, base)
        candidate = replace(
            candidate,
            targets=[ours or kinds for ours, kinds in zip(terms, candidate.targets, strict=True)],
        )
        if base == MEAN or not judge.unclear(candidate):
            found = candidate
        # Sums with a mean that is too small to be noticed: the base decides how often it counts.
        if not judge.unclear(candidate) and not judge.are_sums(candidate):
            break
    unclear = judge.unclear(found)
    if num_rows > 1 and not unclear:
        unclear = judge.not_added_up(found, *(tried(rows, found) for rows in (BOTH, FIRST, SECOND)))
    if unclear:
        _warn(
            model,
            f"in {name}, the loss of {' and of '.join(unclear)} is neither a mean nor a sum over "
            "the rows of a batch",
        )
    return replace(
        found,
        targets=[[MEAN if k == NEITHER else k for k in kinds] for kinds in found.targets],
    )


class _Judge:
    """Compares trials on some rows with the one on these rows twice."""

    def __init__(self, model: keras.Model, whole: Trial) -> None:
        self._model = model
        self._whole = whole
        is_half = "16" in keras.backend.standardize_dtype(model.compute_dtype)
        self._tolerance = _TOLERANCE_HALF if is_half else _TOLERANCE

    def kinds(self, part: Trial, base: str) -> LossKinds:
        whole = self._whole
        targets = []
        for target in targets_of(self._model):
            if id(target) in whole.gradients:
                pair = [trial.gradients.get(id(target), []) for trial in (part, whole)]
                targets.append([self._kind(*pair)])
            else:
                values = [trial.values.get(id(target), []) for trial in (part, whole)]
                pairs = zip(*values, strict=False)
                targets.append([self._kind([one], [other]) for one, other in pairs])
        keys = part.logs.keys() & whole.logs.keys()
        logs = {key: self._kind(part.logs[key], whole.logs[key]) for key in sorted(keys)}
        return LossKinds(base, targets, logs)

    def are_sums(self, kinds: LossKinds) -> bool:
        """Whether all that a step minimizes, or reports as its loss, are sums."""
        named = list(zip(targets_of(self._model), kinds.targets, strict=True))
        found = [k for t, known in named if id(t) in self._whole.gradients for k in known]
        if not self._whole.gradients:
            found = [k for t, known in named if getattr(t, "name", "") == "loss" for k in known[:1]]
        return bool(found) and all(kind == SUM for kind in found)

    def not_added_up(self, kinds: LossKinds, both: Trial, *parts: Trial) -> list[str]:
        """Whom two replicas with different rows give another loss than one with all rows."""
        targets = []
        for target, known in zip(targets_of(self._model), kinds.targets, strict=True):
            if id(target) in both.gradients:
                sums = _added([part.gradients.get(id(target), []) for part in parts])
                wholes = [0.0 if one is None else one for one in both.gradients[id(target)]]
                found = [self._kind(sums, wholes)]
            else:
                values = zip(
                    *(trial.values.get(id(target), []) for trial in (both, *parts)), strict=False
                )
                found = [
                    self._kind([sum(own) / (1 if kind == SUM else 2)], [all_])
                    for kind, (all_, *own) in zip(known, values, strict=False)
                ]
            targets.append([MEAN if kind == MEAN else NEITHER for kind in found])
        return self.unclear(replace(kinds, targets=targets))

    def unclear(self, kinds: LossKinds) -> list[str]:
        """Whom a step gives a loss that is neither a mean nor a sum, in words."""
        model = self._model
        named = list(zip(targets_of(model), kinds.targets, strict=True))
        added = {id(layer) for layer in adding_layers(model)}
        optimizers = {id(optimizer) for optimizer in all_optimizers_of(model)}
        found = [f"`add_loss` of {t.name}" for t, k in named if id(t) in added and NEITHER in k]
        found += [
            f"optimizer {getattr(t, 'name', type(t).__name__)}"
            for t, k in named
            if id(t) in optimizers and NEITHER in k
        ]
        if not self._whole.gradients:
            metrics = [(t, k) for t, k in named if id(t) not in optimizers]
            found += [f"metric {t.name}" for t, k in metrics if t.name == "loss" and NEITHER in k]
        return found

    def _kind(self, part: Sequence[Any], whole: Sequence[Any]) -> str:
        """What numbers are, each an array or None."""
        if [one is None for one in part] != [other is None for other in whole]:
            return NEITHER
        pairs = [
            (np.asarray(one, "float64"), np.asarray(other, "float64"))
            for one, other in zip(part, whole, strict=True)
            if one is not None
        ]
        largest = max((_largest(one, other) for one, other in pairs), default=0.0)
        if not np.isfinite(largest) or largest == 0.0:
            return MEAN  # There is nothing to tell it by.
        for factor, kind in ((1.0, MEAN), (2.0, SUM)):
            if all(
                _largest(other - factor * one)
                <= self._tolerance * (_largest(other) + 1e-3 * largest)
                for one, other in pairs
            ):
                return kind
        return NEITHER


def _added(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """Gradients of replicas, which already have their weights; one may have None."""
    return [
        sum((0.0 if one is None else one) for one in gradients)
        for gradients in zip(*parts, strict=True)
    ]


def _largest(*arrays: Any) -> float:
    return float(np.max([np.max(np.abs(array), initial=0.0) for array in arrays]))


def _warn(model: keras.Model, found: str) -> None:
    world = current_world()
    if world is not None and not world.is_chief:
        return
    warnings.warn(
        f"{type(model).__name__} {model.name!r}: {found}. Each replica computes it on its own "
        "rows, so that training may differ from training on one device; a mean over the unmasked "
        "entries of a batch is such a loss too. Make it a mean or a sum over the rows, give "
        "`compile` a loss that needs the whole batch at once, or use Keras' JAX backend, where "
        "every loss is exact.",
        stacklevel=2,
    )
