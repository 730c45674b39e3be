"""A custom training loop: the user's step, run on every replica.

A step is traced once on one device, which shows the variables that it uses. The optimizers, metrics
and batch norms that they belong to are then hooked. In one process, Keras' variables get a copy for
each replica; in a run, every process is one replica, takes its rows of the same global batches, and
starts with the chief's values. As in tf.distribute, gradients are summed over replicas, so a loss
is divided by the global batch size.
"""

import abc
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from unisono.backends.tensorflow.change_tracker import ChangeTracker
from unisono.backends.tensorflow.collectives import Group
from unisono.backends.tensorflow.distributed import group_of
from unisono.backends.tensorflow.mirrored import strategy_of
from unisono.backends.tensorflow.replica import (
    LinksAcrossProcesses,
    LinksInProcess,
    TensorFlowReplica,
    current_replica,
    running,
)
from unisono.backends.tensorflow.replica_threads import ReplicaThreads
from unisono.backends.tensorflow.variables import (
    StepSeeds,
    mirrored,
    replace_values,
    shared_write,
    spread_seed,
    stay_in_replica,
)
from unisono.data.shards import shard_bounds
from unisono.devices import Placement
from unisono.errors import StrategyError
from unisono.replication.custom_loop import LoopReplication, living_keras_objects
from unisono.replication.introspection import objects_with_state, with_inner

_as_written = tf.autograph.experimental.do_not_convert
_REDUCTIONS = {"sum": tf.distribute.ReduceOp.SUM, "mean": tf.distribute.ReduceOp.MEAN}


class TensorFlowLoop(abc.ABC):
    """See base.CustomLoop; what one process and several have in common."""

    def __init__(self, placement: Placement) -> None:
        self.num_replicas = placement.num_replicas
        self._replication = LoopReplication(current_replica)
        self._known_steps: dict[Any, Any] = {}
        self._objects: dict[int, Any] = {}  # What steps may keep state in.
        self._is_tracing = False

    def begin_epoch(self) -> None:
        if tf.inside_function():
            raise StrategyError(
                "Asked to iterate a distributed data set inside a tf.function. Iterate it in "
                "Python and call the tf.function for each batch."
            )

    def end_epoch(self) -> None:  # noqa: B027
        """A step ends with its run."""

    def run(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if current_replica() is not None:
            raise StrategyError(
                "Asked for strategy.run inside a step that runs on replicas already. Call it from "
                "the loop around the step."
            )
        self._learn(step, args, kwargs)
        # Autograph is to rewrite the user's step only.
        start, finish = map(_as_written, (self._replication.start, self._replication.finish))

        def on_replica(*args: Any, **kwargs: Any) -> Any:
            with running(self._replica((args, kwargs))) as replica:
                start(replica)
                result = step(*args, **kwargs)
                finish(replica)
                return result

        return self.run_on_replicas(on_replica, args, kwargs)

    @_as_written
    def reduce_gradients(self, gradients: Any) -> Any:
        replica = current_replica()
        if replica is not None:
            gradients = list(gradients)
            return self._replication.reduce_gradients(replica, gradients, gradients)
        if not self._is_tracing:
            raise StrategyError(
                "Asked to reduce gradients outside of a step. Call strategy.reduce_gradients in "
                "the function that strategy.run runs."
            )
        self._replication.leave_gradients(None)
        return list(gradients)

    @_as_written
    def reduce(self, how: str, value: Any, axis: int | None) -> Any:
        return keras.tree.map_structure(
            lambda leaf: self.reduce_leaf(how, self._checked(leaf), axis), value
        )

    @_as_written
    def gather(self, value: Any, axis: int) -> Any:
        return keras.tree.map_structure(
            lambda leaf: self.gather_leaf(self._checked(leaf), axis), value
        )

    def replicate(self, state: Any) -> Any:
        """Variables are replicated when a step first uses them."""
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

    # -- what one process and several differ in ------------------------------------------------

    @abc.abstractmethod
    def split(self, batch: Any, num_rows: int) -> Any:
        """See base.CustomLoop."""

    @abc.abstractmethod
    def local_results(self, value: Any) -> tuple[Any, ...]:
        """See base.CustomLoop."""

    @abc.abstractmethod
    def run_on_replicas(
        self, on_replica: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a function on every replica of this process, with its arguments."""

    @abc.abstractmethod
    def new_replica(self, own_rows: Any) -> TensorFlowReplica:
        """The current replica, from the number of its rows."""

    @abc.abstractmethod
    def reduce_leaf(self, how: str, leaf: Any, axis: int | None) -> Any:
        """See `reduce`, of one tensor."""

    @abc.abstractmethod
    def gather_leaf(self, leaf: Any, axis: int) -> Any:
        """See `gather`, of one tensor."""

    @abc.abstractmethod
    def is_result(self, value: Any) -> bool:
        """Whether this can be what `run` returned."""

    @abc.abstractmethod
    def spec(self, value: Any) -> Any:
        """What one device would get in place of an argument."""

    @abc.abstractmethod
    def take_variables(self, variables: list[Any], optimizers: list[Any]) -> None:
        """Replicate variables of a new step, of which it trains some by these optimizers."""

    @abc.abstractmethod
    def check_writes(self, graph: Any) -> None:
        """Raise StrategyError where a step writes to a variable that replicas share."""

    # -- steps ---------------------------------------------------------------------------------

    def _checked(self, value: Any) -> Any:
        if not self.is_result(value):
            raise StrategyError(
                f"Asked to join the replicas' values of a {type(value).__name__}, which is not "
                "what strategy.run returned. Pass the result of strategy.run."
            )
        return value

    @_as_written
    def _replica(self, arguments: Any) -> TensorFlowReplica:
        leaves = [leaf for leaf in keras.tree.flatten(arguments) if tf.is_tensor(leaf)]
        rows = [leaf for leaf in leaves if leaf.shape.rank]
        return self.new_replica(tf.shape(rows[0])[0] if rows else tf.constant(1))

    @_as_written
    def _learn(self, step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Trace a new step on one device, and hook and replicate what it uses."""
        key = _identity(step)
        if key in self._known_steps:
            return
        specs = keras.tree.map_structure(self.spec, (list(args), dict(kwargs)))
        # Not in the scope below, which would stop the gradient tapes of the step.
        self._is_tracing = True
        try:
            traced = tf.function(step).get_concrete_function(*specs[0], **specs[1])
        finally:
            self._is_tracing = False
        used = {id(variable) for variable in traced.graph.variables}
        with tf.init_scope():
            models, optimizers, metrics = (
                [o for o in objects if any(id(v._value) in used for v in o.variables)]
                for objects in living_keras_objects()
            )
            owners = [*models, *optimizers, *metrics]
            owned = {id(v): v for o in owners for v in o.variables}
            every = [v for v in gc.get_objects() if issubclass(type(v), keras.Variable)]
            loose = [v for v in every if id(v._value) in used and id(v) not in owned]
            self.check_writes(traced.graph)
            self._replication.take(models, optimizers, metrics)
            for optimizer in with_inner(optimizers):
                stay_in_replica(optimizer)
            objects = [o for model in models for o in objects_with_state(model)]
            self._objects |= {id(o): o for o in [*objects, *with_inner(optimizers), *metrics]}
            self.take_variables([*owned.values(), *loose], optimizers)
        self._known_steps[key] = step  # Kept alive: a key may contain ids.


class MirroredLoop(TensorFlowLoop):
    """All replicas in this process."""

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        self._strategy = strategy_of(placement)
        self._spread_seeds: dict[int, Any] = {}

    def split(self, batch: Any, num_rows: int) -> Any:
        def own_rows(context: Any) -> Any:
            replica = context.replica_id_in_sync_group
            start, stop = shard_bounds(num_rows, self.num_replicas, replica)
            return keras.tree.map_structure(lambda leaf: leaf[start:stop], batch)

        batch = keras.tree.map_structure(tf.convert_to_tensor, batch)
        return self._strategy.experimental_distribute_values_from_function(own_rows)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        results: tuple[Any, ...] = self._strategy.experimental_local_results(value)
        return results

    def run_on_replicas(
        self, on_replica: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        threads = self._threads()

        def in_thread(*args: Any, **kwargs: Any) -> Any:
            with threads.replica():
                return on_replica(*args, **kwargs)

        results = self._strategy.run(in_thread, tuple(args), dict(kwargs))
        threads.finish()
        return results

    @_as_written
    def _threads(self) -> ReplicaThreads:
        return ReplicaThreads(self._strategy, self._objects.values())

    def new_replica(self, own_rows: Any) -> TensorFlowReplica:
        context = tf.distribute.get_replica_context()
        # As a float: NCCL does not reduce integers here.
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(own_rows, tf.float32))
        links = LinksInProcess(self.num_replicas)
        return TensorFlowReplica(tf.cast(total, tf.int32), links, is_custom_loop=True)

    def reduce_leaf(self, how: str, leaf: Any, axis: int | None) -> Any:
        return self._strategy.reduce(_REDUCTIONS[how], leaf, axis=axis)

    def gather_leaf(self, leaf: Any, axis: int) -> Any:
        return tf.concat(self.local_results(leaf), axis)

    def is_result(self, value: Any) -> bool:
        return self.num_replicas == 1 or _is_per_replica(value)

    def spec(self, value: Any) -> Any:
        if _is_per_replica(value):
            value = self.local_results(value)[0]
            return tf.TensorSpec([None, *value.shape[1:]], value.dtype)
        return tf.TensorSpec(value.shape, value.dtype) if tf.is_tensor(value) else value

    def take_variables(self, variables: list[Any], optimizers: list[Any]) -> None:
        replace_values(
            variables,
            lambda variable: mirrored(variable, self._strategy),
            more_optimizers=optimizers,
        )
        for state in variables:
            if state.name == "seed_generator_state" and id(state) not in self._spread_seeds:
                self._spread_seeds[id(state)] = state
                spread_seed(state)

    def check_writes(self, graph: Any) -> None:
        problem = None if self.num_replicas == 1 else shared_write(graph)
        if problem is not None:
            raise StrategyError(problem)


class ProcessLoop(TensorFlowLoop):
    """One replica in each process of a run, with plain variables."""

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        self._group = group_of()
        self._strategy = _Strategy(f"{placement.kind.upper()}:0", self._group.size)
        self._taken: dict[int, Any] = {}

    def split(self, batch: Any, num_rows: int) -> Any:
        start, stop = shard_bounds(num_rows, self._group.size, self._group.rank)
        return keras.tree.map_structure(lambda leaf: tf.convert_to_tensor(leaf)[start:stop], batch)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        return (value,)

    def run_on_replicas(
        self, on_replica: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        seeds = StepSeeds(rank=self._group.rank)
        with _Context(self._strategy, self._group), seeds.used():
            return on_replica(*args, **kwargs)

    def new_replica(self, own_rows: Any) -> TensorFlowReplica:
        (num_rows,) = self._group.all_reduce([own_rows])
        return TensorFlowReplica(num_rows, LinksAcrossProcesses(self._group), is_custom_loop=True)

    def reduce_leaf(self, how: str, leaf: Any, axis: int | None) -> Any:
        count = 1 if axis is None else tf.shape(leaf)[axis]
        own = leaf if axis is None else tf.reduce_sum(leaf, axis)
        if how == "sum":
            return self._group.all_reduce([own])[0]
        total, count = self._group.all_reduce([own, tf.cast(count, own.dtype)])
        return total / count

    def gather_leaf(self, leaf: Any, axis: int) -> Any:
        return _gathered(self._group, leaf, axis)

    def is_result(self, value: Any) -> bool:
        return bool(tf.is_tensor(value))

    def spec(self, value: Any) -> Any:
        if not tf.is_tensor(value) or not value.shape.rank:
            return value
        return tf.TensorSpec([None, *value.shape[1:]], value.dtype)

    def take_variables(self, variables: list[Any], optimizers: list[Any]) -> None:
        new = [v for v in variables if v._value is not None and id(v) not in self._taken]
        self._taken |= {id(variable): variable for variable in new}
        changes = ChangeTracker(self._group)
        changes.track(new)
        changes.take_over(range(len(new)))

    def check_writes(self, graph: Any) -> None:
        """Processes share no variables."""


class _Strategy(tf.distribute.OneDeviceStrategy):
    """Tells TensorFlow and Keras inside a step how many replicas there are, to scale losses."""

    def __init__(self, device: str, num_replicas: int) -> None:
        super().__init__(device)
        self._num_replicas = num_replicas

    @property
    def num_replicas_in_sync(self) -> int:
        return self._num_replicas


class _Context(tf.distribute.ReplicaContext):
    """The replica context of a step, with collectives over the processes."""

    def __init__(self, strategy: _Strategy, group: Group) -> None:
        super().__init__(strategy, replica_id_in_sync_group=group.rank)
        self._group = group

    @_as_written
    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        is_mean = str(getattr(reduce_op, "value", reduce_op)).lower() == "mean"
        leaves = tf.nest.flatten(value)
        sums = LinksAcrossProcesses(self._group).all_reduce(leaves)
        sums = [one / self._group.size for one in sums] if is_mean else sums
        return tf.nest.pack_sequence_as(value, sums)

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


def _is_per_replica(value: Any) -> bool:
    return isinstance(value, tf.distribute.DistributedValues) and not isinstance(value, tf.Variable)


def _identity(step: Any) -> Any:
    """Equal for functions of one source and one closure: a lambda is a new object each time."""
    code = getattr(step, "__code__", None)
    if code is None:
        return step
    cells = getattr(step, "__closure__", None) or ()
    owner = getattr(step, "__self__", None)
    return (code, id(owner), *(id(cell.cell_contents) for cell in cells))
