"""Variables with a copy on each replica, put in the place of a Keras variable's plain one."""

import contextlib
import gc
from collections.abc import Callable, Iterable, Set
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute.distribute_lib import get_update_replica_id
from tensorflow.python.distribute.values import MirroredVariable

from unisono.replication.interrupts import interrupts_held_back
from unisono.replication.introspection import optimizers_of, rename_variables, with_inner
from unisono.replication.step import SEED_STRIDE


class PlainLookingVariable(MirroredVariable):
    """A mirrored variable that can be used where a plain tf.Variable can.

    Callbacks say `float(model.optimizer.learning_rate)`, and a plain model may share layers.
    """

    def __int__(self) -> int:
        return int(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def _update(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        # TensorFlow loses its place among its scopes when it is interrupted in one.
        with interrupts_held_back() if tf.executing_eagerly() else contextlib.nullcontext():
            return self._update_copies(update_fn, value, **kwargs)

    def _update_copies(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        if get_update_replica_id() is None or isinstance(get_update_replica_id(), int):
            return super()._update(update_fn, value, **kwargs)
        # The optimizer of a plain model, which trains this variable too: all copies follow.
        with self.distribute_strategy.scope():
            return self._update_cross_replica(update_fn, value, **kwargs)

    def __complex__(self) -> complex:
        return complex(self.numpy())

    def __bool__(self) -> bool:
        return bool(self.numpy())


def mirrored(variable: Any, strategy: tf.distribute.Strategy) -> Any:
    """What a Keras variable should hold under a strategy; each replica writes its own copy."""
    value = variable._value
    if isinstance(value, MirroredVariable) and value.distribute_strategy is strategy:
        return value
    initial = value.numpy()  # Read out here: it may belong to the scope of another strategy.
    with strategy.scope():
        copies = tf.Variable(
            initial,
            dtype=value.dtype,
            # Not the Keras variable's: a layer that is frozen now may be thawed later, and
            # TensorFlow's own flag says for good whether a gradient can be taken.
            trainable=value.trainable,
            name=variable.name,
            aggregation=tf.VariableAggregation.NONE,
            synchronization=tf.VariableSynchronization.ON_WRITE,
        )
    copies.__class__ = PlainLookingVariable
    return copies


def plain(variable: Any) -> Any:
    """What a Keras variable should hold without a strategy."""
    value = variable._value
    return tf.Variable(
        value.numpy(), dtype=value.dtype, trainable=value.trainable, name=variable.name
    )


def spread_seed(state: Any) -> None:
    """Replicas other than the first draw from streams of their own."""
    values = state._value.values
    first = values[0].numpy()
    for replica, value in enumerate(values[1:], start=1):
        value.assign([first[0] + replica * SEED_STRIDE, first[1]])


def replace_values(
    variables: Iterable[Any],
    copy: Callable[[Any], Any],
    *,
    owner: keras.Model | None = None,
    more_optimizers: Iterable[Any] = (),
) -> None:
    """Give Keras variables new tf.Variables, and optimizers the keys that go with them.

    Models other than the `owner` that share one of them trace their steps again.
    """
    variables = [v for v in variables if v._value is not None]
    copies = [copy(variable) for variable in variables]
    pairs = zip(variables, copies, strict=True)
    changed = {id(v): (v, new) for v, new in pairs if v._value is not new}
    if not changed:
        return
    has_moved = any(isinstance(v._value, MirroredVariable) for v, _ in changed.values())
    # Only layers are shared between models, not their metrics and optimizers.
    own = {id(v) for v in owner.variables} if owner is not None else changed.keys()
    others, built = _users_of(own & changed.keys(), owner)
    models = others if owner is None else [owner, *others]
    optimizers = {id(o): o for one in models for o in with_inner(optimizers_of(one))}
    optimizers |= {id(o): o for o in with_inner([*more_optimizers, *built])}
    keys = {i: {id(v): o._var_key(v) for v, _ in changed.values()} for i, o in optimizers.items()}
    for variable, new in changed.values():
        variable._value = new
    for i, optimizer in optimizers.items():
        renamed = {keys[i][id(v)]: optimizer._var_key(v) for v, _ in changed.values()}
        rename_variables(optimizer, renamed)
    for one in models if has_moved else others:
        forget_functions(one)


def forget_functions(model: keras.Model) -> None:
    """Have a model trace its steps again: those of before hold on to other variables."""
    model.train_function = None
    model.test_function = None
    model.predict_function = None


def _users_of(
    variables: Set[int], owner: keras.Model | None
) -> tuple[list[keras.Model], list[Any]]:
    """Other models that share one of these variables, and optimizers that were built for one.

    There is no register of them, and an optimizer of a custom training loop belongs to no model.
    """
    models: list[keras.Model] = []
    optimizers: list[Any] = []
    for found in gc.get_objects() if variables else ():
        if issubclass(type(found), keras.Model):
            if found is not owner and any(id(v) in variables for v in found.variables):
                models.append(found)
        elif issubclass(type(found), keras.optimizers.Optimizer):
            known = getattr(found, "_trainable_variables", ())
            if any(id(variable) in variables for variable in known):
                optimizers.append(found)
    return models, optimizers
