"""A user's own training loop on TensorFlow in a run of several processes, each one replica.

Every process runs the same loop with the same global batches and takes its rows of them. A step
runs as it stands, with plain variables; its optimizers, metrics and batch norms are hooked once a
first trace has shown which it uses, and begin with the chief's values.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from unisono.backends.tensorflow.change_tracker import Watch
from unisono.backends.tensorflow.distributed import group_of
from unisono.backends.tensorflow.links import LinksAcrossProcesses
from unisono.backends.tensorflow.optimizer import stay_in_replica
from unisono.backends.tensorflow.process_group import Group
from unisono.backends.tensorflow.replica import TensorFlowReplica, current_replica, running
from unisono.backends.tensorflow.seeds import StepSeeds
from unisono.backends.tensorflow.steps import KnownSteps, first_rows, variables_of
from unisono.data.shards import shard_bounds
from unisono.devices import Placement
from unisono.errors import StrategyError
from unisono.replication.custom_loop import LoopReplication
from unisono.replication.introspection import with_inner

_as_written = tf.autograph.experimental.do_not_convert


class TensorFlowWorldLoop:
    """See base.CustomLoop."""

    def __init__(self, placement: Placement) -> None:
        self.num_replicas = placement.num_replicas
        self._group = group_of()
        self._strategy = _Strategy(f"{placement.kind.upper()}:0", self._group.size)
        self._replication = LoopReplication(current_replica)
        self._known_steps = KnownSteps(_spec, self._take)
        self._taken: dict[int, Any] = {}

    def split(self, batch: Any, num_rows: int) -> Any:
        start, stop = shard_bounds(num_rows, self._group.size, self._group.rank)
        return keras.tree.map_structure(lambda leaf: tf.convert_to_tensor(leaf)[start:stop], batch)

    def begin_epoch(self) -> None:
        if tf.inside_function():
            raise StrategyError(
                "Asked to iterate a distributed data set inside a tf.function. Iterate it in "
                "Python and call the tf.function for each batch."
            )

    def end_epoch(self) -> None:
        """A step ends with its run."""

    def run(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if current_replica() is not None:
            raise StrategyError(
                "Asked for strategy.run inside a step that runs on replicas already. Call it from "
                "the loop around the step."
            )
        self._known_steps.learn(step, args, kwargs)
        # Only the user's step is for autograph to rewrite.
        start, finish = map(_as_written, (self._replication.start, self._replication.finish))
        with (
            _Context(self._strategy, self._group),
            StepSeeds(rank=self._group.rank).used(),
            running(self._replica((args, kwargs))) as replica,
        ):
            start(replica)
            result = step(*args, **kwargs)
            finish(replica)
            return result

    @_as_written
    def reduce(self, how: str, value: Any, axis: int | None) -> Any:
        def reduce_leaf(leaf: Any) -> Any:
            _check(leaf)
            count = 1 if axis is None else tf.shape(leaf)[axis]
            own = leaf if axis is None else tf.reduce_sum(leaf, axis)
            if how == "sum":
                return self._group.all_reduce([own])[0]
            total, count = self._group.all_reduce([own, tf.cast(count, own.dtype)])
            return total / count

        return keras.tree.map_structure(reduce_leaf, value)

    @_as_written
    def gather(self, value: Any, axis: int) -> Any:
        def gather_leaf(leaf: Any) -> Any:
            _check(leaf)
            return _gathered(self._group, leaf, axis)

        return keras.tree.map_structure(gather_leaf, value)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        return (value,)

    @_as_written
    def reduce_gradients(self, gradients: Any) -> Any:
        replica = current_replica()
        if replica is not None:
            gradients = list(gradients)
            return self._replication.reduce_gradients(replica, gradients, gradients)
        if not self._known_steps.is_tracing:
            raise StrategyError(
                "Asked to reduce gradients outside of a step. Call strategy.reduce_gradients in "
                "the function that strategy.run runs."
            )
        self._replication.leave_gradients(None)
        return list(gradients)

    def replicate(self, state: Any) -> Any:
        """Variables take over the chief's values when a step first uses them."""
        return state

    @_as_written
    def part_of_sum(self, value: Any) -> Any:
        replica = current_replica()
        if replica is not None:
            replica.state.parts_of_sums[id(value)] = value
        return value

    def num_rows(self) -> Any:
        replica = current_replica()
        return None if replica is None else replica.num_rows

    def num_parts(self) -> int:
        return 1 if current_replica() is None else self.num_replicas

    @_as_written
    def _replica(self, arguments: Any) -> TensorFlowReplica:
        rows = first_rows(arguments)
        own = tf.shape(rows[0])[0] if rows else tf.constant(1)
        (num_rows,) = self._group.all_reduce([own])
        links = LinksAcrossProcesses(self._group)
        return TensorFlowReplica(num_rows, links, is_own_loop=True)

    def _take(
        self, models: list[Any], optimizers: list[Any], metrics: list[Any], loose: list[Any]
    ) -> None:
        self._replication.take(models, optimizers, metrics)
        for optimizer in with_inner(optimizers):
            stay_in_replica(optimizer)
        found = [*variables_of([*models, *optimizers, *metrics]), *loose]
        new = [v for v in found if v._value is not None and id(v) not in self._taken]
        self._taken |= {id(variable): variable for variable in new}
        watch = Watch(self._group)
        watch.take(new)
        watch.take_over(range(len(new)))


class _Strategy(tf.distribute.OneDeviceStrategy):
    """Whom TensorFlow and Keras ask inside a step how many replicas there are, to scale losses."""

    def __init__(self, device: str, num_replicas: int) -> None:
        super().__init__(device)
        self._num_replicas = num_replicas

    @property
    def num_replicas_in_sync(self) -> int:
        return self._num_replicas


class _Context(tf.distribute.ReplicaContext):
    """What a step of TensorFlow's own knows about its replica, and sums over replicas by."""

    def __init__(self, strategy: _Strategy, group: Group) -> None:
        super().__init__(strategy, replica_id_in_sync_group=group.rank)
        self._group = group

    @_as_written
    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        is_mean = str(getattr(reduce_op, "value", reduce_op)).lower() == "mean"
        leaves = tf.nest.flatten(value)
        totals = LinksAcrossProcesses(self._group).all_reduce(leaves)
        totals = [total / self._group.size for total in totals] if is_mean else totals
        return tf.nest.pack_sequence_as(value, totals)

    @_as_written
    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        return tf.nest.map_structure(lambda leaf: _gathered(self._group, leaf, axis), value)


@_as_written
def _gathered(group: Group, value: Any, axis: int) -> Any:
    order = list(range(value.shape.rank))
    order.insert(0, order.pop(axis))
    rows = tf.transpose(value, order)
    every = group.gather_rows(rows, group.row_counts(rows))
    return tf.transpose(every, tf.argsort(order))


def _check(value: Any) -> None:
    if not tf.is_tensor(value):
        raise StrategyError(
            f"Asked to join the replicas' values of a {type(value).__name__}, which is not a "
            "tensor. Pass what strategy.run returned."
        )


def _spec(value: Any) -> Any:
    """What one device would get in place of an argument."""
    if not tf.is_tensor(value) or not value.shape.rank:
        return value
    return tf.TensorSpec([None, *value.shape[1:]], value.dtype)
