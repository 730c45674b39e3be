"""TensorFlow: one process, tf.distribute runs the replicas of a step.

The model is adopted where it stands: each Keras variable's tf.Variable becomes a MirroredVariable
whose copies are written by their own replica (aggregation NONE), and gradients are summed at the
entry of `optimizer.apply`. The data pipeline stays a plain tf.data iterator; a step slices the
global batch itself. Runs of several processes are in tensorflow_world_replicas.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from unisono.backends.tensorflow import cpu_layers
from unisono.backends.tensorflow.build import build, build_for_prediction, spec_of
from unisono.backends.tensorflow.collectives import TensorFlowCollectives
from unisono.backends.tensorflow.cpu_layers import leave_kernels, use_kernels
from unisono.backends.tensorflow.custom_loop import TensorFlowLoop
from unisono.backends.tensorflow.distributed import group_of
from unisono.backends.tensorflow.feed import leave_tuned, leave_untuned
from unisono.backends.tensorflow.links import LinksInProcess
from unisono.backends.tensorflow.loss_check import learn_kinds
from unisono.backends.tensorflow.multi_process import TensorFlowWorldReplicas
from unisono.backends.tensorflow.multi_process_loop import TensorFlowWorldLoop
from unisono.backends.tensorflow.optimizer import leave_replica, stay_in_replica
from unisono.backends.tensorflow.placement import device_scope, locate, log_placement
from unisono.backends.tensorflow.replica import (
    TensorFlowReplica,
    after_data,
    current_replica,
    num_rows,
    running,
)
from unisono.backends.tensorflow.rows import join_rows, rows_between
from unisono.backends.tensorflow.strategy import check_strategy, strategy_of
from unisono.backends.tensorflow.threads import ReplicaThreads
from unisono.backends.tensorflow.variables import (
    forget_functions,
    mirrored,
    plain,
    replace_values,
    spread_seed,
)
from unisono.devices import Placement
from unisono.devices.locations import Location
from unisono.errors import StartedError
from unisono.hooks import bind, original, unbind
from unisono.replication.checksums import (
    checksum,
    compared_variables,
    names_of,
    own_checksums,
)
from unisono.replication.introspection import (
    objects_with_state,
    optimizers_of,
    seed_states,
    with_inner,
)
from unisono.replication.replication import Replication

_STEPS = ("train_step", "test_step")
_HOOKS = (
    *_STEPS,
    "predict_step",
    "make_train_function",
    "make_test_function",
    "make_predict_function",
    "_maybe_symbolic_build",
)


class TensorFlowBackend:
    """Replicas under a mirrored strategy."""

    backend = "tensorflow"

    def num_gpus(self) -> int:
        return len(tf.config.get_visible_devices("GPU"))

    def prepare(self, placement: Placement) -> None:
        count = max(placement.indices) + 1
        if placement.kind != "cpu" or count == 1:
            return
        found = len(tf.config.list_logical_devices("CPU"))
        if found < count:
            raise StartedError(
                f"Asked for {count} CPU replicas; TensorFlow has started with {found} CPU "
                f"device(s), and their number is fixed from then on. {_remedy(found, count)}"
            )

    def replicate(
        self, model: keras.Model, placement: Placement, *, sync_batch_norm: bool
    ) -> "SingleReplica | TensorFlowReplicas | TensorFlowWorldReplicas":
        check_strategy(model)
        if placement.num_processes > 1:
            return TensorFlowWorldReplicas(model, placement, sync_batch_norm=sync_batch_norm)
        if placement.num_replicas == 1 and placement.indices == (0,):
            return SingleReplica(model, placement, sync_batch_norm)
        return TensorFlowReplicas(model, placement, sync_batch_norm=sync_batch_norm)

    def custom_loop(self, placement: Placement) -> TensorFlowLoop | TensorFlowWorldLoop:
        if placement.num_processes > 1:
            return TensorFlowWorldLoop(placement)
        return TensorFlowLoop(placement)

    def collectives(self, ranks: Sequence[int] | None = None) -> TensorFlowCollectives:
        return TensorFlowCollectives(group_of(None if ranks is None else tuple(ranks)))

    def device_scope(self, placement: Placement) -> AbstractContextManager[None]:
        self.prepare(placement)
        return device_scope(placement)

    def locate(self, values: Sequence[Any]) -> list[Location | None]:
        return [locate(value) for value in values]

    def log_placement(self, is_on: bool) -> None:
        log_placement(is_on)


class SingleReplica:
    """One replica on the default device: plain Keras, but for what makes it faster."""

    def __init__(self, model: keras.Model, placement: Placement, sync_batch_norm: bool) -> None:
        self.placement = placement
        self.sync_batch_norm = sync_batch_norm
        self.feed = None
        self._model = model
        leave_untuned(model)
        if placement.kind == "cpu":
            use_kernels(model, current_replica, is_alone=True)
        for name in _STEPS:
            bind(model, name, self._step(name))
        forget_functions(model)

    def _step(self, name: str) -> Callable[[Any], Any]:
        def step(data: Any) -> Any:
            with after_data(data):
                return original(self._model, name)(data)

        return step

    def release(self) -> None:
        leave_tuned(self._model)
        unbind(self._model, *_STEPS)
        leave_kernels(self._model)
        forget_functions(self._model)

    def settle(self, when: str) -> None:
        """All replicas are in this process."""

    def variable_names(self) -> list[str]:
        return names_of(self._model)

    def checksums(self) -> list[list[int]]:
        return [own_checksums(self._model)]


class TensorFlowReplicas:
    """A model whose variables are mirrored and whose steps run on every replica."""

    def __init__(self, model: keras.Model, placement: Placement, *, sync_batch_norm: bool) -> None:
        self.placement = placement
        self.sync_batch_norm = sync_batch_norm
        self.feed = None
        self._strategy = strategy_of(placement)
        self._num_replicas = placement.num_replicas
        self._model = model
        self._replication = Replication(
            model,
            current_replica,
            sync_batch_norm=sync_batch_norm,
            kernels=cpu_layers if placement.kind == "cpu" else None,
        )
        leave_untuned(model)
        self._own_jit_compile = model._jit_compile
        for name in _STEPS:
            bind(model, name, self._step(name))
        bind(model, "make_train_function", self._maker("train"))
        bind(model, "make_test_function", self._maker("test"))
        bind(model, "predict_step", self._predict_step)
        bind(model, "make_predict_function", self._make_predict_function)
        bind(model, "_maybe_symbolic_build", self._build)
        forget_functions(self._model)
        self._mirror()

    def release(self) -> None:
        self._replication.release()
        leave_tuned(self._model)
        unbind(self._model, *_HOOKS)
        for optimizer in with_inner(optimizers_of(self._model)):
            leave_replica(optimizer)
        self._replace_variables(plain)
        self._model._jit_compile = self._own_jit_compile
        forget_functions(self._model)

    def settle(self, when: str) -> None:
        """All replicas are in this process."""

    def variable_names(self) -> list[str]:
        return names_of(self._model)

    def checksums(self) -> list[list[int]]:
        values = [
            self._strategy.experimental_local_results(variable._value)
            for variable in compared_variables(self._model)
        ]
        count = self._num_replicas
        return [[checksum(copies[r % len(copies)]) for copies in values] for r in range(count)]

    # -- adopting ------------------------------------------------------------------------------

    def _build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Create all variables before a step is traced, where replicas could not."""
        data_batch = spec_of(iterator) if data_batch is None else data_batch
        build(self._model, self._mirror, data_batch)

    def _mirror(self) -> None:
        self._model._jit_compile = False  # XLA cannot span the devices of a strategy.
        self._replication.prepare()
        for optimizer in with_inner(optimizers_of(self._model)):
            stay_in_replica(optimizer)
        with tf.init_scope():
            self._replace_variables(lambda v: mirrored(v, self._strategy))
            for state in seed_states(self._model):
                spread_seed(state)

    def _replace_variables(self, copy: Callable[[Any], Any]) -> None:
        """Give every variable a new tf.Variable, and optimizers the keys that go with them."""
        model = self._model
        variables = list(model.variables)
        # A user's `metrics` may need what their `compile` makes.
        variables += model.metrics_variables if model.compiled else []
        for optimizer in with_inner(optimizers_of(model)):
            variables += optimizer.variables
        replace_values(variables, copy, owner=model)

    # -- steps ---------------------------------------------------------------------------------

    def _step(self, name: str) -> Callable[[Any], Any]:
        def step(data: Any) -> Any:
            def on_replica(replica: TensorFlowReplica) -> Any:
                with after_data(data):
                    return self._replication.run(name, replica.own_rows(data))

            return self._first(self._run(on_replica, data))

        return step

    def _maker(self, kind: str) -> Callable[..., Any]:
        """Keras' `make_train_function` or `make_test_function`."""
        model, attribute = self._model, f"{kind}_function"

        def make(force: bool = False) -> Any:
            if getattr(model, attribute) is None or force:
                original(model, f"make_{attribute}")(force=True)
                plain = getattr(model, attribute)
                setattr(model, attribute, self._learning(f"{kind}_step", plain))
            return getattr(model, attribute)

        return make

    def _learning(self, name: str, plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A train or test function that learns, before it is traced, what its losses are."""

        def function(iterator: Any) -> Any:
            if not self._replication.must_learn(name):
                return plain(iterator)
            batch = next(iterator)
            self._learn_kinds(name, batch)
            return plain(_with_first(batch, iterator, self._model.steps_per_execution))

        return function

    def _learn_kinds(self, name: str, batch: Any) -> None:
        self._replication.prepare()
        # As the first replica, whose copies of variables are used and put back.
        first = tf.distribute.ReplicaContext(self._strategy, replica_id_in_sync_group=0)
        with first, tf.device(self._strategy.extended.worker_devices[0]):
            kinds = learn_kinds(self._model, self._replication, name, batch)
        self._replication.learn(name, kinds)

    def _make_predict_function(self, force: bool = False) -> Any:
        model = self._model
        self._mirror()  # Another model that shares layers may have taken them elsewhere.
        if model.predict_function is None or force:
            original(model, "make_predict_function")(force=True)
            predict = model.predict_function

            def build_first(data: Any) -> Any:
                # Here and not in the step: a variable made while that is traced has no copies.
                if not model.built:
                    build_for_prediction(model, self._mirror, data[0])
                return predict(data)

            model.predict_function = build_first
        return model.predict_function

    def _predict_step(self, data: Any) -> Any:
        every: list[Any] = []  # What each replica predicts, in order.

        def on_replica(replica: TensorFlowReplica) -> Any:
            outputs = original(self._model, "predict_step")(replica.own_rows(data))
            every.append(outputs)
            # In dense parts: tf.distribute knows no ragged and sparse tensors.
            return tf.nest.flatten(keras.tree.flatten(outputs), expand_composites=True)

        results = [
            self._strategy.experimental_local_results(r) for r in self._run(on_replica, data)
        ]
        parts = [
            tf.nest.pack_sequence_as(keras.tree.flatten(outputs), own, expand_composites=True)
            for outputs, own in zip(every, zip(*results, strict=True), strict=True)
        ]
        count = num_rows(data)
        joined = [rows_between(join_rows(leaves), 0, count) for leaves in zip(*parts, strict=True)]
        return keras.tree.pack_sequence_as(every[0], joined)

    def _run(self, on_replica: Callable[[TensorFlowReplica], Any], data: Any) -> Any:
        count = num_rows(data)
        threads = ReplicaThreads(self._strategy, objects_with_state(self._model))

        def run() -> Any:
            links = LinksInProcess(self._num_replicas)
            with threads.replica(), running(TensorFlowReplica(count, links)) as replica:
                return on_replica(replica)

        results = self._strategy.run(run)
        threads.finish()
        return results

    def _first(self, values: Any) -> Any:
        return keras.tree.map_structure(
            lambda value: self._strategy.experimental_local_results(value)[0], values
        )


def _with_first(batch: Any, iterator: Any, num_batches: int) -> Any:
    """An iterator of as many batches, of which the first has been taken already."""
    rest = itertools.islice(iterator, num_batches - 1)
    if not isinstance(iterator, tf.data.Iterator):
        return itertools.chain([batch], rest)
    # Of the same type, for which Keras traces its function anyway: a batch by itself has a number
    # of rows, and would be traced apart.
    return iter(
        tf.data.Dataset.from_generator(
            lambda: itertools.chain([batch], rest), output_signature=iterator.element_spec
        )
    )


def _remedy(found: int, count: int) -> str:
    if found == 1:
        return (
            "Move `import unisono` above the first line that uses TensorFlow (building a model, "
            "making a tensor or a data set)."
        )
    return (
        f"Set UNISONO_REPLICAS={count} before the start, or, where the program itself calls "
        f"set_logical_device_configuration, ask for {count} there."
    )
