"""One replica per process of a run: a model whose steps all processes run together.

Variables stay plain; collectives inside the step make it the step on the global batch. Steps are
called one by one from Python and never looped in a graph, because the processes agree before each
step on what they are about to do.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from unisono.backends.tensorflow.change_tracker import ChangeTracker
from unisono.backends.tensorflow.collectives import naming_lost_peers
from unisono.backends.tensorflow.distributed import group_of
from unisono.backends.tensorflow.feed import ArrayShards
from unisono.backends.tensorflow.replica import (
    LinksAcrossProcesses,
    TensorFlowReplica,
    current_replica,
    rows_between,
    running,
    spec_of_any_rows,
)
from unisono.backends.tensorflow.trainer import Trainer
from unisono.backends.tensorflow.variables import StepSeeds
from unisono.data.feed import Feed, Shard
from unisono.devices import Placement
from unisono.hooks import bind_in_step, original, unbind
from unisono.launch.client import current_world
from unisono.replication.introspection import (
    is_sum_of_samples,
    leaf_metrics,
    optimizers_of,
    with_inner,
)
from unisono.replication.loss_kinds import LossKinds
from unisono.replication.step import apply_gradients

OnReplica = Callable[[TensorFlowReplica, Any], Any]


class ProcessTrainer(Trainer):
    """A model of which this process is one replica."""

    feed: Feed

    def __init__(self, model: keras.Model, placement: Placement, *, sync_batch_norm: bool) -> None:
        world = current_world()
        assert world is not None
        self._links = LinksAcrossProcesses(group_of())
        self._changes = ChangeTracker(group_of())
        self._hooked_optimizers: list[Any] = []
        self.feed = Feed(
            world, needs_even_shards=False, rows_between=rows_between, batches_of=ArrayShards
        )
        super().__init__(model, placement, sync_batch_norm=sync_batch_norm)

    def release(self) -> None:
        super().release()
        self._changes.release()
        for optimizer in self._hooked_optimizers:
            unbind(optimizer, "apply")

    def settle(self, when: str) -> None:
        with self.feed.calling(when), naming_lost_peers():
            self._take_over_changes(Shard(None, 0, True, 0))

    def hook_optimizers(self) -> None:
        """Before the replication, whose `apply` would all-reduce gradients at once."""
        self._waits_for_metrics = _metrics_ignore_weights(self._model)
        for optimizer in optimizers_of(self._model):
            if bind_in_step(optimizer, "apply", self._apply, current_replica):
                self._hooked_optimizers.append(optimizer)

    def _apply(
        self,
        replica: TensorFlowReplica,
        optimizer: Any,
        plain: Any,
        grads: Any,
        *rest: Any,
        **more: Any,
    ) -> Any:
        """Apply gradients, where possible together with the metrics: one collective for both."""
        apply = functools.partial(apply_gradients, replica, optimizer, plain, grads, *rest, **more)
        return replica.postpone(apply) if self._waits_for_metrics else apply()

    def take_variables(self) -> None:
        self._changes.track(self._variables())

    def _variables(self) -> Iterator[Any]:
        """What must be equal in all processes. Metrics start at zero, and every step makes them
        equal."""
        model = self._model
        metrics = {id(v) for v in model.metrics_variables} if model.compiled else set()
        yield from (v for v in model.variables if id(v) not in metrics)
        for optimizer in with_inner(optimizers_of(model)):
            yield from optimizer.variables

    # -- functions and steps -------------------------------------------------------------------

    def function(self, name: str) -> Callable[[Any], Any]:
        step = self._compiled(lambda replica, data: self._replication.run(name, data))

        def function(iterator: Any) -> Any:
            logs = None
            for _, batch in zip(range(self._model.steps_per_execution), iterator, strict=False):
                if self.must_learn(name):
                    self.learn_kinds(name, batch)
                logs = self._run(step, batch)
            if logs is None:
                raise StopIteration
            return logs

        return function

    def predict_function(self) -> Callable[[Any], Any]:
        step = self._compiled(self._predict)

        def function(batches: list[Any]) -> Any:
            outputs = [self._run(step, batch) for batch in batches]
            if len(outputs) == 1:
                return outputs[0]
            return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

        return function

    def _predict(self, replica: TensorFlowReplica, data: Any) -> Any:
        outputs = original(self._model, "predict_step")(data)
        return keras.tree.map_structure(replica.gather_rows, outputs)

    def local_data(self, batch: Any) -> Any:
        return keras.tree.map_structure(_to_tensor, self.feed.shard(batch).data)

    def agreed(self, name: str, kinds: LossKinds) -> LossKinds:
        """Every process tries its rows, and all take over what the chief found."""
        where = f"{self.feed.where()}, losses of {name}"
        return LossKinds(**self.feed.world.broadcast(where, dataclasses.asdict(kinds)))

    def _compiled(self, on_replica: OnReplica) -> Callable[[Any, Any], Any]:
        def step(data: Any, num_rows: Any) -> Any:
            replica = TensorFlowReplica(num_rows, self._links)
            with StepSeeds(rank=self._links.index).used(), running(replica):
                result = on_replica(replica, data)
                replica.all_reduce([])  # Runs what is still postponed.
                return result

        return step if self._model.run_eagerly else _Compiled(step)

    def _run(self, step: Callable[[Any, Any], Any], batch: Any) -> Any:
        """One step of all processes on a global batch, of which this one has a shard."""
        shard = self.feed.shard(batch)
        with naming_lost_peers():
            self._take_over_changes(shard)
            data = keras.tree.map_structure(_to_tensor, shard.data)
            return step(data, tf.convert_to_tensor(shard.num_rows, tf.int32))

    def _take_over_changes(self, shard: Shard) -> None:
        """Agree on a step, and take over what the chief has written since the last one."""
        changed = self.feed.agree(shard, self._changes.changed(), self._changes.describe)
        self._changes.take_over(changed)


def _metrics_ignore_weights(model: Any) -> bool:
    """Whether a step may update weights after its metrics: where all that it runs is Keras'."""
    is_own = all(
        getattr(type(model), name) is getattr(keras.Model, name)
        for name in ("train_step", "compute_metrics", "get_metrics_result")
    )
    return is_own and all(map(is_sum_of_samples, leaf_metrics(model)))


class _Compiled:
    """A step as a tf.function, which is traced once for any number of rows."""

    def __init__(self, step: Callable[[Any, Any], Any]) -> None:
        self._function = tf.function(step, reduce_retracing=True, autograph=False)
        self._traced: set[str] = set()

    def __call__(self, data: Any, num_rows: Any) -> Any:
        # Processes may have different numbers of rows, and the last batch fewer. Data of another
        # structure (with weights, without targets) is traced for any number too.
        specs = keras.tree.map_structure(spec_of_any_rows, data)
        if (name := repr(specs)) not in self._traced:
            self._function.get_concrete_function(specs, tf.TensorSpec([], tf.int32))
            self._traced.add(name)
        return self._function(data, num_rows)


def _to_tensor(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    is_ready = isinstance(leaf, (tf.Tensor, tf.SparseTensor, tf.RaggedTensor))
    return leaf if is_ready else tf.convert_to_tensor(leaf)
