"""TensorFlow in a run of several processes: a model whose steps are made together by all of them.

Each process is one replica with plain variables; collectives inside the step make it the step on
the global batch. Steps are called one by one from Python and never looped in a graph, because the
processes agree before each on what they are about to do.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from unisono.backends.tensorflow import cpu_layers
from unisono.backends.tensorflow.build import build, build_for_prediction, spec_of
from unisono.backends.tensorflow.change_tracker import Watch
from unisono.backends.tensorflow.distributed import group_of
from unisono.backends.tensorflow.links import LinksAcrossProcesses
from unisono.backends.tensorflow.loss_check import learn_kinds
from unisono.backends.tensorflow.process_group import naming_lost_peers
from unisono.backends.tensorflow.replica import TensorFlowReplica, current_replica, running
from unisono.backends.tensorflow.rows import rows_between, spec_of_any_rows
from unisono.backends.tensorflow.seeds import StepSeeds
from unisono.backends.tensorflow.variables import forget_functions
from unisono.data.feed import Feed, Shard
from unisono.devices import Placement
from unisono.hooks import bind, bind_in_step, original, unbind
from unisono.launch.client import current_world
from unisono.replication.checksums import names_of, own_checksums
from unisono.replication.introspection import (
    is_sum_of_samples,
    leaf_metrics,
    optimizers_of,
    with_inner,
)
from unisono.replication.loss_kinds import LossKinds
from unisono.replication.replication import Replication
from unisono.replication.step import apply_gradients

_HOOKS = (
    "make_train_function",
    "make_test_function",
    "make_predict_function",
    "_maybe_symbolic_build",
)
OnReplica = Callable[[TensorFlowReplica, Any], Any]


class TensorFlowWorldReplicas:
    """See base.ReplicatedModel."""

    def __init__(self, model: keras.Model, placement: Placement, *, sync_batch_norm: bool) -> None:
        world = current_world()
        assert world is not None
        self.placement = placement
        self.sync_batch_norm = sync_batch_norm
        self._model = model
        self._links = LinksAcrossProcesses(group_of())
        self._watch = Watch(group_of())
        self.feed = Feed(world, needs_even_shards=False, rows_between=rows_between)
        self._hooked_optimizers: list[Any] = []
        self._hook_optimizers()
        self._replication = Replication(
            model,
            current_replica,
            sync_batch_norm=sync_batch_norm,
            kernels=cpu_layers if placement.kind == "cpu" else None,
        )
        self._own_jit_compile = model._jit_compile
        bind(model, "make_train_function", self._maker("train"))
        bind(model, "make_test_function", self._maker("test"))
        bind(model, "make_predict_function", self._make_predict_function)
        bind(model, "_maybe_symbolic_build", self._build)
        forget_functions(model)
        self._prepare()

    def release(self) -> None:
        self._replication.release()
        self._watch.release()
        unbind(self._model, *_HOOKS)
        for optimizer in self._hooked_optimizers:
            unbind(optimizer, "apply")
        self._model._jit_compile = self._own_jit_compile
        forget_functions(self._model)

    def variable_names(self) -> list[str]:
        return names_of(self._model)

    def checksums(self) -> list[list[int]]:
        return [own_checksums(self._model)]

    # -- adopting ------------------------------------------------------------------------------

    def _build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if data_batch is None:
            spec = spec_of(iterator)
            data_batch = spec.data if isinstance(spec, Shard) else spec
        build(self._model, self._prepare, data_batch)

    def _prepare(self) -> None:
        self._model._jit_compile = False  # XLA knows no collectives between processes.
        self._hook_optimizers()
        self._replication.prepare()
        self._watch.take(self._variables())

    def _hook_optimizers(self) -> None:
        """Before the replication does, whose `apply` would add up gradients at once."""
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

    def _variables(self) -> Iterator[Any]:
        """What all processes hold alike. Metrics begin at zero, and every step makes them equal."""
        model = self._model
        metrics = {id(v) for v in model.metrics_variables} if model.compiled else set()
        yield from (v for v in model.variables if id(v) not in metrics)
        for optimizer in with_inner(optimizers_of(model)):
            yield from optimizer.variables

    # -- steps ---------------------------------------------------------------------------------

    def _maker(self, kind: str) -> Callable[..., Any]:
        """Keras' `make_train_function` or `make_test_function`."""
        model, attribute = self._model, f"{kind}_function"

        def make(force: bool = False) -> Any:
            if getattr(model, attribute) is None or force:
                setattr(model, attribute, self._function(f"{kind}_step"))
            return getattr(model, attribute)

        return make

    def _function(self, name: str) -> Callable[[Any], Any]:
        step = self._compiled(lambda replica, data: self._replication.run(name, data))

        def function(iterator: Any) -> Any:
            logs = None
            for _, batch in zip(range(self._model.steps_per_execution), iterator, strict=False):
                if self._replication.must_learn(name):
                    self._learn_kinds(name, batch)
                logs = self._run(step, batch)
            if logs is None:
                raise StopIteration
            return logs

        return function

    def _learn_kinds(self, name: str, batch: Any) -> None:
        """Every process tries its rows, and all believe the chief."""
        self._replication.prepare()
        data = keras.tree.map_structure(_to_tensor, self.feed.shard(batch).data)
        kinds = learn_kinds(self._model, self._replication, name, data)
        where = f"{self.feed.where()}, losses of {name}"
        found = self.feed.world.broadcast(where, dataclasses.asdict(kinds))
        self._replication.learn(name, LossKinds(**found))

    def _make_predict_function(self, force: bool = False) -> Any:
        model = self._model
        if model.predict_function is not None and not force:
            return model.predict_function
        step = self._compiled(self._predict)

        def function(batches: list[Any]) -> Any:
            if not model.built:
                build_for_prediction(model, self._prepare, self.feed.shard(batches[0]).data)
            outputs = [self._run(step, batch) for batch in batches]
            if len(outputs) == 1:
                return outputs[0]
            return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

        model.predict_function = function
        return function

    def _predict(self, replica: TensorFlowReplica, data: Any) -> Any:
        outputs = original(self._model, "predict_step")(data)
        return keras.tree.map_structure(replica.gather_rows, outputs)

    def _compiled(self, on_replica: OnReplica) -> Callable[[Any, Any], Any]:
        def step(data: Any, num_rows: Any) -> Any:
            replica = TensorFlowReplica(num_rows, self._links)
            with StepSeeds(rank=self._links.index).used(), running(replica):
                result = on_replica(replica, data)
                replica.all_reduce([])  # Should anything still be postponed.
                return result

        return step if self._model.run_eagerly else _Compiled(step)

    def settle(self, when: str) -> None:
        """Take over what the chief has written since the last step."""
        with self.feed.calling(when), naming_lost_peers():
            share = Shard(None, 0, True, 0)
            changed = self.feed.agree(share, self._watch.changed(), self._watch.describe)
            self._watch.take_over(changed)

    def _run(self, step: Callable[[Any, Any], Any], batch: Any) -> Any:
        """One step of all processes on a global batch, of which this one has its share."""
        share = self.feed.shard(batch)
        changed = self.feed.agree(share, self._watch.changed(), self._watch.describe)
        with naming_lost_peers():
            self._watch.take_over(changed)
            data = keras.tree.map_structure(_to_tensor, share.data)
            return step(data, tf.convert_to_tensor(share.num_rows, tf.int32))


def _metrics_ignore_weights(model: Any) -> bool:
    """Whether a step may update weights after its metrics: all that it runs then is Keras' own."""
    is_own = all(
        getattr(type(model), name) is getattr(keras.Model, name)
        for name in ("train_step", "compute_metrics", "get_metrics_result")
    )
    return is_own and all(map(is_sum_of_samples, leaf_metrics(model)))


class _Compiled:
    """A step as a tf.function, which is traced for any number of rows at once."""

    def __init__(self, step: Callable[[Any, Any], Any]) -> None:
        self._function = tf.function(step, reduce_retracing=True, autograph=False)
        self._traced: set[str] = set()

    def __call__(self, data: Any, num_rows: Any) -> Any:
        # Processes may have different numbers of rows, and the last batch fewer. Data of other
        # parts (with weights, without targets) is traced for any number too.
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
