"""Try a step on TensorFlow, to learn what its losses are: see loss_check.

It runs eagerly: to trace a function of it would take longer.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from unisono.backends.tensorflow.replica import TensorFlowReplica, num_rows, running
from unisono.backends.tensorflow.rows import join_rows, rows_between
from unisono.replication.loss_check import find_kinds, num_rows_tried
from unisono.replication.loss_kinds import LossKinds
from unisono.replication.replication import Replication
from unisono.replication.step import StepState


class Twins:
    """Replicas that all have the same rows as this one; see tensorflow_replica.Links."""

    index = 0

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas

    def all_reduce(self, operands: Sequence[Any]) -> list[Any]:
        return [self._total(operand) for operand in operands]

    def gather(self, x: Any, num_rows: Any, is_replicated: Any) -> Any:
        return join_rows([x] * self.num_replicas)

    def _total(self, operand: Any) -> Any:
        factor = tf.cast(self.num_replicas, operand.dtype)
        if isinstance(operand, tf.IndexedSlices):
            return tf.IndexedSlices(operand.values * factor, operand.indices, operand.dense_shape)
        return operand * factor


class Twin(TensorFlowReplica):
    """One of them."""

    def stack(self, x: Any) -> Any:
        # What the losses of twins owe to this one's part is what its own owes to theirs.
        return tf.stack([x] * self._num_replicas)


def learn_kinds(model: keras.Model, replication: Replication, name: str, data: Any) -> LossKinds:
    """What the losses of a step are, from the first rows of some data."""
    count = num_rows_tried(int(num_rows(data)))

    def try_step(has_twin: bool, state: StepState) -> None:
        times = 1 if has_twin else 2
        rows = keras.tree.map_structure(lambda leaf: _first(leaf, count, times), data)
        links = Twins(2 if has_twin else 1)
        replica = Twin(tf.constant(2 * count), links)
        replica.state = state
        with running(replica):
            replication.run(name, rows)
            replica.all_reduce([])  # Should anything still be postponed.

    return find_kinds(model, name, try_step)


def _first(leaf: Any, count: int, times: int) -> Any:
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    return join_rows([rows_between(leaf, 0, count)] * times)
