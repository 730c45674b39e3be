"""The strategies of tf.distribute that replicas run under, and their variables."""

from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.distribute_lib import get_update_replica_id
from tensorflow.python.distribute.values import MirroredVariable

from unisono.devices import Placement
from unisono.engines.tensorflow_replica import current_replica

_strategies: dict[Placement, tf.distribute.Strategy] = {}


class MirroredStrategy(tf.distribute.MirroredStrategy):
    """TensorFlow's, but inside a step Keras must not divide losses by the number of replicas."""

    def __init__(self, placement: Placement) -> None:
        # Strategies number their collectives alike, and two with one number stop each other.
        self._collective_key_base = 1_000_000 * (len(_strategies) + 1)
        devices = [f"{placement.kind.upper()}:{i}" for i in placement.indices]
        # Virtual CPU devices share their memory: adding up there needs no collective at all.
        reduction = tf.distribute.ReductionToOneDevice() if placement.kind == "cpu" else None
        super().__init__(devices, cross_device_ops=reduction)

    @property
    def num_replicas_in_sync(self) -> int:
        return 1 if current_replica() is not None else super().num_replicas_in_sync


def strategy_of(placement: Placement) -> tf.distribute.Strategy:
    """The one strategy of a placement, shared by all models on it."""
    if placement not in _strategies:
        _strategies[placement] = MirroredStrategy(placement)
    return _strategies[placement]


class PlainLookingVariable(MirroredVariable):
    """A mirrored variable that can be used where a plain tf.Variable can.

    Callbacks say `float(model.optimizer.learning_rate)`, and a plain model may share layers.
    """

    def __int__(self) -> int:
        return int(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def _update(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        if get_update_replica_id() is None or isinstance(get_update_replica_id(), int):
            return super()._update(update_fn, value, **kwargs)
        # The optimizer of a plain model, which trains this variable too: all copies follow.
        with self.distribute_strategy.scope():
            return self._update_cross_replica(update_fn, value, **kwargs)

    def __complex__(self) -> complex:
        return complex(self.numpy())

    def __bool__(self) -> bool:
        return bool(self.numpy())


def mirrored_copy(value: Any, strategy: tf.distribute.Strategy, name: str) -> PlainLookingVariable:
    """A variable with a copy on each replica, which writes its own; from a plain one's value."""
    initial = value.numpy()  # Read out here: it may belong to the scope of another strategy.
    with strategy.scope():
        mirrored = tf.Variable(
            initial,
            dtype=value.dtype,
            # Not the Keras variable's: a layer that is frozen now may be thawed later, and
            # TensorFlow's own flag says for good whether a gradient can be taken.
            trainable=value.trainable,
            name=name,
            aggregation=tf.VariableAggregation.NONE,
            synchronization=tf.VariableSynchronization.ON_WRITE,
        )
    mirrored.__class__ = PlainLookingVariable
    return mirrored  # type: ignore[no-any-return]


def plain_copy(value: Any, name: str) -> tf.Variable:
    return tf.Variable(value.numpy(), dtype=value.dtype, trainable=value.trainable, name=name)
