"""Find out, once per compiled model, whether what a step minimizes and reports are means or sums.

A step is tried on a few rows of the first batch, by a replica that has a twin with the same rows,
and on these rows twice, by a replica that is alone. Both must come to the same gradients and
reports. If those of the rows twice are twice as large, what the step minimizes is a sum.

A trial leaves no trace: weights are not updated, all state is restored, and both trials draw the
same random numbers for a row, whichever function draws them. While a step is tried, in its thread
only, the functions that draw are replaced and dropout is off.
"""

import functools
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import keras
import numpy as np
from keras import ops

from unisono.hooks import Patch
from unisono.keras_internals import (
    ADDED_LOSSES,
    global_seed_state,
    layers_of,
    random_module,
    value_of,
)
from unisono.launch.client import current_world
from unisono.replication.framework import framework
from unisono.replication.introspection import leaf_metrics, optimizers_of, with_inner
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
from unisono.replication.step import StepState, Trial

MOST_ROWS = 8
# Far from both: what is neither by less than this is rounding.
_TOLERANCE, _TOLERANCE_HALF = 2e-3, 5e-2

# Those of keras.random.
_DRAWS = (
    *("normal", "uniform", "truncated_normal", "randint", "categorical", "shuffle", "gamma"),
    *("binomial", "beta"),
)
_thread = threading.local()

TryStep = Callable[[bool, StepState], None]
"""Runs a step on a few rows by a replica with a twin, or, if not, on these rows twice by one that
is alone; with this state."""


def num_rows_tried(num_rows: int) -> int:
    """How many rows of a batch are tried: twice as many fit wherever the batch does."""
    return max(1, min(MOST_ROWS, num_rows // 2))


def find_kinds(model: keras.Model, name: str, try_step: TryStep) -> LossKinds:
    """What the losses of a model's `train_step` or `test_step` are; warns of what is neither."""
    try:
        return _find_kinds(model, name, try_step)
    except Exception as error:  # Whatever a user's step does: if it fails there, it says so itself.
        _warn(
            model,
            f"{name} could not be tried on a few rows of the first batch, so whether its loss is "
            f"a mean or a sum over rows is unknown ({type(error).__name__}: {error})",
        )
        return LossKinds()


def _find_kinds(model: keras.Model, name: str, try_step: TryStep) -> LossKinds:
    draws = Draws()

    def tried(has_twin: bool, kinds: LossKinds) -> Trial:
        state = StepState(kinds=KnownKinds(model, kinds), trial=Trial())
        with restored(model), draws.repeated():
            try_step(has_twin, state)
        assert state.trial is not None
        return state.trial

    part, whole = tried(True, LossKinds()), tried(False, LossKinds())
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
        trial = part if is_tried else tried(True, LossKinds(base, terms))
        candidate = judge.kinds(trial, base)
        candidate = replace(
            candidate,
            targets=[ours or kinds for ours, kinds in zip(terms, candidate.targets, strict=True)],
        )
        if base == MEAN or not judge.unclear(candidate):
            found = candidate
        if not judge.unclear(candidate):
            break
    unclear = judge.unclear(found)
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


def _largest(*arrays: Any) -> float:
    return float(np.max([np.max(np.abs(array), initial=0.0) for array in arrays]))


def _warn(model: keras.Model, found: str) -> None:
    world = current_world()
    if world is not None and not world.is_chief:
        return
    warnings.warn(
        f"{type(model).__name__} {model.name!r}: {found}. It counts as a mean over each replica's "
        "rows, so that training may differ from training on one device. Make it a mean or a sum "
        "over the rows of the batch, give `compile` a loss that needs the whole batch at once, or "
        "use Keras' JAX backend, where every loss is exact.",
        stacklevel=2,
    )


# -- trials that leave no trace ------------------------------------------------------------------


class Draws:
    """The random numbers of a step: kept at its first run, and given again at later ones."""

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._place = 0

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Run a step inside."""
        self._place = 0
        before = getattr(_thread, "draws", None)
        with ExitStack() as stack:
            for patch in _patches():
                stack.enter_context(patch.applied())
            _thread.draws = self
            try:
                yield
            finally:
                _thread.draws = before

    def draw(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        drawn = plain(*args, **kwargs)
        place, self._place = self._place, self._place + 1
        if place == len(self._kept):
            self._kept.append(ops.stop_gradient(drawn))
        elif place < len(self._kept):
            kept = self._kept[place]
            if kept.shape == drawn.shape:
                return kept
            if kept.shape and tuple(drawn.shape) == (2 * kept.shape[0], *kept.shape[1:]):
                return ops.concatenate([kept, kept])
        return ops.stop_gradient(drawn)


@contextmanager
def restored(model: keras.Model) -> Iterator[None]:
    """Put back whatever a step inside changes: variables, attributes, the states of generators."""
    variables = _variables_of(model)
    values = [ops.copy(ops.stop_gradient(v.value)) for v in variables]
    attributes = [(layer, _attributes_of(layer)) for layer in layers_of(model)]
    put_back: list[Callable[[], Any]] = [
        functools.partial(random.setstate, random.getstate()),
        functools.partial(np.random.set_state, np.random.get_state()),
        *framework().trial_state(model),
    ]
    try:
        yield
    finally:
        for variable, value in zip(variables, values, strict=True):
            if not bool(ops.all(ops.equal(ops.stop_gradient(variable.value), value))):
                variable.assign(value)
        for layer, kept in attributes:
            _put_back_attributes(layer, kept)
        for put in put_back:
            put()


def _variables_of(model: keras.Model) -> list[Any]:
    found = [*model.variables]
    found += [v for metric in leaf_metrics(model) for v in metric.variables]
    # Slots are an optimizer's own; what programs write are its learning rate and its counters.
    for optimizer in with_inner(optimizers_of(model)):
        found += [v for v in optimizer.variables if not v.shape]
    seeds = global_seed_state()
    found += [] if seeds is None else [seeds]
    return list({id(v): v for v in found if value_of(v) is not None}.values())


def _attributes_of(layer: Any) -> dict[str, Any]:
    """Numbers, and what is in lists: counters and records that a program keeps."""
    # Keras' own say what has been built, which stays so.
    names = [name for name in vars(layer) if name == ADDED_LOSSES or not name.startswith("_")]
    values = {name: vars(layer)[name] for name in names if name != "built"}
    kept = {k: v for k, v in values.items() if isinstance(v, (int, float))}
    return kept | {k: (v, list(v)) for k, v in values.items() if isinstance(v, list)}


def _put_back_attributes(layer: Any, kept: dict[str, Any]) -> None:
    for name, value in kept.items():
        if isinstance(value, tuple):
            list.__setitem__(value[0], slice(None), value[1])  # Past those who track changes.
        elif isinstance(vars(layer).get(name), (int, float)):
            vars(layer)[name] = value


def _patches() -> list[Patch]:
    """The functions that draw and drop, in threads that try a step.

    Looked up for each trial: `import tensorflow.random` makes `tf.random` another object.
    """
    of_keras = random_module()
    draws = [*((of_keras, name) for name in _DRAWS), *framework().drawing_functions()]
    dropouts = [(of_keras, "dropout"), *framework().dropout_functions()]
    return [
        _patch(module, name, make)
        for names, make in ((draws, _repeating), (dropouts, _keeping))
        for module, name in names
    ]


@functools.cache
def _patch(module: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> Patch:
    """One for each function: a patch counts its users."""
    return Patch(lambda: module, name, make)


def _repeating(plain: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        draws: Draws | None = getattr(_thread, "draws", None)
        return plain(*args, **kwargs) if draws is None else draws.draw(plain, *args, **kwargs)

    return function


def _keeping(plain: Callable[..., Any]) -> Callable[..., Any]:
    def dropout(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        is_tried = getattr(_thread, "draws", None) is not None
        return inputs if is_tried else plain(inputs, *args, **kwargs)

    return dropout
