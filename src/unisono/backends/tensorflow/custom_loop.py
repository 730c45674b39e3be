"""A user's own training loop under TensorFlow: their step, run on every replica.

Which variables a step uses is known once it has been traced on one device; those of Keras then
get a copy per replica, and the optimizers and metrics that they belong to are hooked. As in
tf.distribute, gradients are summed over replicas, so a loss is divided by the global batch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from unisono.backends.tensorflow.links import LinksInProcess
from unisono.backends.tensorflow.optimizer import stay_in_replica
from unisono.backends.tensorflow.replica import TensorFlowReplica, current_replica, running
from unisono.backends.tensorflow.steps import KnownSteps, first_rows, variables_of
from unisono.backends.tensorflow.strategy import strategy_of
from unisono.backends.tensorflow.threads import ReplicaThreads
from unisono.backends.tensorflow.variables import mirrored, replace_values, spread_seed
from unisono.data.shards import shard_bounds
from unisono.devices import Placement
from unisono.errors import StrategyError
from unisono.replication.custom_loop import LoopReplication
from unisono.replication.introspection import objects_with_state, with_inner

_as_written = tf.autograph.experimental.do_not_convert
_REDUCTIONS = {"sum": tf.distribute.ReduceOp.SUM, "mean": tf.distribute.ReduceOp.MEAN}


class TensorFlowLoop:
    """See base.CustomLoop."""

    def __init__(self, placement: Placement) -> None:
        self.num_replicas = placement.num_replicas
        self._strategy = strategy_of(placement)
        self._replication = LoopReplication(current_replica)
        is_shared = self.num_replicas > 1
        self._known_steps = KnownSteps(self._spec, self._take, is_shared=is_shared)
        self._spread_seeds: dict[int, Any] = {}
        self._objects: dict[int, Any] = {}

    def split(self, batch: Any, num_rows: int) -> Any:
        def own_rows(context: Any) -> Any:
            replica = context.replica_id_in_sync_group
            start, stop = shard_bounds(num_rows, self.num_replicas, replica)
            return keras.tree.map_structure(lambda leaf: leaf[start:stop], batch)

        batch = keras.tree.map_structure(tf.convert_to_tensor, batch)
        return self._strategy.experimental_distribute_values_from_function(own_rows)

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

        # Of what runs on a replica, only the user's step is for autograph to rewrite.
        start, finish = map(_as_written, (self._replication.start, self._replication.finish))
        threads = self._threads()

        def on_replica(*args: Any, **kwargs: Any) -> Any:
            with threads.replica(), running(self._replica((args, kwargs))) as replica:
                start(replica)
                result = step(*args, **kwargs)
                finish(replica)
                return result

        results = self._strategy.run(on_replica, tuple(args), dict(kwargs))
        threads.finish()
        return results

    @_as_written
    def reduce(self, how: str, value: Any, axis: int | None) -> Any:
        def reduce_leaf(leaf: Any) -> Any:
            self._check(leaf)
            return self._strategy.reduce(_REDUCTIONS[how], leaf, axis=axis)

        return keras.tree.map_structure(reduce_leaf, value)

    @_as_written
    def gather(self, value: Any, axis: int) -> Any:
        def gather_leaf(leaf: Any) -> Any:
            self._check(leaf)
            return tf.concat(self.local_results(leaf), axis)

        return keras.tree.map_structure(gather_leaf, value)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        results: tuple[Any, ...] = self._strategy.experimental_local_results(value)
        return results

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
        """Variables get their copies when a step first uses them."""
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

    def _check(self, value: Any) -> None:
        if self.num_replicas > 1 and not _is_per_replica(value):
            raise StrategyError(
                f"Asked to join the replicas' values of a {type(value).__name__}, which is not "
                "what strategy.run returned. Pass the result of strategy.run."
            )

    @_as_written
    def _replica(self, arguments: Any) -> TensorFlowReplica:
        rows = first_rows(arguments)
        own = tf.shape(rows[0])[0] if rows else 1
        context = tf.distribute.get_replica_context()
        # As a float: NCCL adds up no integers.
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(own, tf.float32))
        num_rows = tf.cast(total, tf.int32)
        links = LinksInProcess(self.num_replicas)
        return TensorFlowReplica(num_rows, links, is_own_loop=True)

    @_as_written
    def _threads(self) -> ReplicaThreads:
        return ReplicaThreads(self._strategy, self._objects.values())

    def _take(
        self, models: list[Any], optimizers: list[Any], metrics: list[Any], loose: list[Any]
    ) -> None:
        self._replication.take(models, optimizers, metrics)
        objects = [o for model in models for o in objects_with_state(model)]
        objects += [*with_inner(optimizers), *metrics]
        self._objects |= {id(o): o for o in objects}
        variables = [*variables_of([*models, *optimizers, *metrics]), *loose]
        for optimizer in with_inner(optimizers):
            stay_in_replica(optimizer)
        replace_values(
            variables,
            lambda variable: mirrored(variable, self._strategy),
            more_optimizers=optimizers,
        )
        for state in variables:
            if state.name == "seed_generator_state" and id(state) not in self._spread_seeds:
                self._spread_seeds[id(state)] = state
                spread_seed(state)

    def _spec(self, value: Any) -> Any:
        """What one device would get in place of an argument."""
        if _is_per_replica(value):
            value = self.local_results(value)[0]
            return tf.TensorSpec([None, *value.shape[1:]], value.dtype)
        if tf.is_tensor(value):
            return tf.TensorSpec(value.shape, value.dtype)
        return value


def _is_per_replica(value: Any) -> bool:
    return isinstance(value, tf.distribute.DistributedValues) and not isinstance(value, tf.Variable)
