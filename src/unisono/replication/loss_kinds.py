"""What the losses of a step are over the rows of a batch: means, sums, or neither.

Replicas that see only their own rows have to know: the mean over a batch is the mean of the
replicas' means, weighted by their rows, and its sum is the sum of their sums. A model whose steps
are Keras' own and whose layers add no losses is known without looking (see `must_check`).
"""

import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras

from unisono.keras_internals import layers_of
from unisono.replication.framework import framework
from unisono.replication.introspection import leaf_metrics, optimizers_of

MEAN, SUM, NEITHER = "mean", "sum", "neither"
# Their classes, of which layers are made, add none but for activity regularizers.
_FRAMEWORKS = {"builtins", "keras", "tensorflow", "torch"}
_adds_losses: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class LossKinds:
    """What one step of a model minimizes and reports; plain data, the same in every process."""

    base: str = MEAN
    """What an objective is that has several terms: those known one by one (the compiled loss,
    regularizers, what layers add) are scaled to fit."""
    targets: list[list[str]] = field(default_factory=list)
    """For each of `targets_of` what it is given in a step, in that order."""
    logs: dict[str, str] = field(default_factory=dict)
    """For what a step returns beside metrics."""


class KnownKinds:
    """The kinds of a step, by the objects of a model in this process."""

    def __init__(self, model: keras.Model, kinds: LossKinds) -> None:
        self.base = kinds.base
        self.logs = kinds.logs
        self._by_id = {
            id(target): known
            for target, known in zip(targets_of(model), kinds.targets, strict=False)
        }
        found = [kind for o in all_optimizers_of(model) for kind in self._by_id.get(id(o), [])]
        self.are_all_sums = bool(found) and all(kind == SUM for kind in found)

    def of(self, target: Any, place: int = 0) -> str:
        """What a target is given at this place of a step; empty where that is unknown."""
        known = self._by_id.get(id(target), [])
        return known[place] if place < len(known) else ""


def targets_of(model: keras.Model) -> list[Any]:
    """Who is given losses and what is made of them: optimizers, metrics, layers that add some."""
    return [*all_optimizers_of(model), *leaf_metrics(model), *adding_layers(model)]


def all_optimizers_of(model: keras.Model) -> list[Any]:
    """The optimizers that a model holds, of Keras and of the framework."""
    return [*optimizers_of(model), *framework().native_optimizers(model)]


def must_check(model: keras.Model, name: str) -> bool:
    """Whether a step runs code that can minimize or report something other than means."""
    names = (name, "compute_loss", "compute_metrics")
    is_keras = all(_is_of_keras(getattr(type(model), one)) for one in names)
    return not is_keras or any(True for _ in adding_layers(model))


def adding_layers(model: keras.Model) -> Iterator[Any]:
    """The layers whose code adds losses. (Keras' own do so for activity regularizers: means.)"""
    for layer in layers_of(model):
        cls = type(layer)
        if cls not in _adds_losses:
            _adds_losses[cls] = any(map(_says_add_loss, _codes_of(cls)))
        if _adds_losses[cls]:
            yield layer


def _codes_of(cls: type) -> Iterator[types.CodeType]:
    """The code of a class and of the functions beside it, as far as users have written it."""
    for one in cls.__mro__:
        if one.__module__.partition(".")[0] not in _FRAMEWORKS:
            yield from _codes_in(vars(one).values())
            yield from _codes_in(vars(sys.modules.get(one.__module__, types)).values())


def _codes_in(values: Iterable[Any]) -> Iterator[types.CodeType]:
    for value in list(values):
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        while isinstance(value, types.FunctionType):
            yield value.__code__
            value = getattr(value, "__wrapped__", None)


def _says_add_loss(code: types.CodeType) -> bool:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    said = (*code.co_names, *code.co_consts)
    return "add_loss" in said or any(map(_says_add_loss, inner))


def _is_of_keras(function: Any) -> bool:
    return bool(function.__module__.partition(".")[0] == "keras")
