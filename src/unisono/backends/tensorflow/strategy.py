"""The strategies of tf.distribute that replicas run under."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from unisono.backends.tensorflow.replica import current_replica
from unisono.devices import Placement
from unisono.errors import ModelError
from unisono.replication.introspection import optimizers_of, with_inner

_strategies: dict[Placement, tf.distribute.Strategy] = {}


class MirroredStrategy(tf.distribute.MirroredStrategy):
    """TensorFlow's, but inside a step Keras must not divide losses by the number of replicas."""

    def __init__(self, placement: Placement) -> None:
        # Strategies number their collectives alike, and two with one number stop each other.
        self._collective_key_base = 1_000_000 * (len(_strategies) + 1)
        self.is_merging = placement.kind == "cpu"
        """Whether replicas meet in cross-replica context to add up, and not in a collective."""
        devices = [f"{placement.kind.upper()}:{i}" for i in placement.indices]
        # Virtual CPU devices share their memory: adding up there needs no collective at all.
        reduction = tf.distribute.ReductionToOneDevice() if placement.kind == "cpu" else None
        super().__init__(devices, cross_device_ops=reduction)

    @property
    def num_replicas_in_sync(self) -> int:
        replica = current_replica()
        is_trainers_step = replica is not None and not replica.is_own_loop
        return 1 if is_trainers_step else super().num_replicas_in_sync


def strategy_of(placement: Placement) -> tf.distribute.Strategy:
    """The one strategy of a placement, shared by all models on it."""
    if placement not in _strategies:
        _strategies[placement] = MirroredStrategy(placement)
    return _strategies[placement]


def check_strategy(model: Any) -> None:
    """Raise ModelError where a user's own strategy of tf.distribute has a hold on a model."""
    for strategy in _strategies_around(model):
        # TensorFlow has one for what is under none.
        is_none = strategy is None or type(strategy).__name__ == "_DefaultDistributionStrategy"
        if not (is_none or isinstance(strategy, MirroredStrategy)):
            raise ModelError(
                f"Asked to parallelize a model that belongs to a {type(strategy).__name__} of "
                "tf.distribute: it, its optimizer or this call is under that strategy's scope. "
                "Build, compile and train it outside of `strategy.scope()`; where a scope is "
                "wanted, use unisono.Strategy or unisono.compat.MirroredStrategy."
            )


def _strategies_around(model: Any) -> Iterator[Any]:
    if tf.distribute.has_strategy():
        yield tf.distribute.get_strategy()
    yield model._distribute_strategy
    optimizers = list(with_inner(optimizers_of(model)))
    for optimizer in optimizers:
        yield getattr(optimizer, "_distribution_strategy", None)
    variables = [*model.variables, *(v for one in optimizers for v in one.variables)]
    for variable in variables:
        yield getattr(variable._value, "distribute_strategy", None)
