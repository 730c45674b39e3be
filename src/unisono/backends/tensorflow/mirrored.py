"""Replicas of one process: variables are mirrored, and tf.distribute runs a step on each replica.

The model is made parallel in place: each Keras variable's tf.Variable becomes a MirroredVariable
whose copies are written by their own replica (aggregation NONE), and gradients are all-reduced at
the entry of `optimizer.apply`. The input pipeline stays a plain tf.data iterator; a step slices the
global batch itself.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from unisono.backends.tensorflow.replica import (
    LinksInProcess,
    TensorFlowReplica,
    after_data,
    current_replica,
    join_rows,
    num_rows,
    rows_between,
    running,
)
from unisono.backends.tensorflow.replica_threads import ReplicaThreads
from unisono.backends.tensorflow.trainer import Trainer
from unisono.backends.tensorflow.variables import (
    mirrored,
    plain,
    replace_values,
    restore_optimizer,
    shared_write,
    spread_seed,
    stay_in_replica,
)
from unisono.devices import Placement
from unisono.errors import ModelError
from unisono.hooks import bind, original
from unisono.replication.checksums import checksum, compared_variables
from unisono.replication.introspection import (
    objects_with_state,
    optimizers_of,
    seed_states,
    with_inner,
)

_strategies: dict[Placement, tf.distribute.Strategy] = {}


class MirroredTrainer(Trainer):
    """A model whose variables are mirrored and whose steps run on every replica."""

    def __init__(self, model: keras.Model, placement: Placement, *, sync_batch_norm: bool) -> None:
        self._strategy = strategy_of(placement)
        for name in ("train_step", "test_step"):
            bind(model, name, self._step(name))
        bind(model, "predict_step", self._predict_step)
        super().__init__(model, placement, sync_batch_norm=sync_batch_norm)

    def release(self) -> None:
        super().release()
        for optimizer in with_inner(optimizers_of(self._model)):
            restore_optimizer(optimizer)
        self._replace_variables(plain)

    def settle(self, when: str) -> None:
        """All replicas are in this process."""

    def checksums(self) -> list[list[int]]:
        values = [
            self._strategy.experimental_local_results(variable._value)
            for variable in compared_variables(self._model)
        ]
        count = self.placement.num_replicas
        return [[checksum(copies[r % len(copies)]) for copies in values] for r in range(count)]

    def hook_optimizers(self) -> None:
        for optimizer in with_inner(optimizers_of(self._model)):
            stay_in_replica(optimizer)

    def take_variables(self) -> None:
        with tf.init_scope():
            self._replace_variables(lambda v: mirrored(v, self._strategy))
            for state in seed_states(self._model):
                spread_seed(state)

    def _replace_variables(self, copy: Callable[[Any], Any]) -> None:
        """Give every variable a new tf.Variable, and optimizers the keys that go with them."""
        replace_values(self._variables(), copy, owner=self._model)

    def _variables(self) -> list[Any]:
        model = self._model
        variables = list(model.variables)
        # A user's `metrics` may need what their `compile` makes.
        variables += model.metrics_variables if model.compiled else []
        for optimizer in with_inner(optimizers_of(model)):
            variables += optimizer.variables
        return variables

    # -- functions -----------------------------------------------------------------------------

    def function(self, name: str) -> Callable[[Any], Any]:
        run = self._keras_function(name.removesuffix("_step"))

        def function(iterator: Any) -> Any:
            if not self.must_learn(name):
                return run(iterator)
            batch = next(iterator)
            self.learn_kinds(name, batch)
            return run(_with_first(batch, iterator, self._model.steps_per_execution))

        return function

    def predict_function(self) -> Callable[[Any], Any]:
        return self._keras_function("predict")

    def _keras_function(self, kind: str) -> Callable[[Any], Any]:
        """The function that Keras makes of a step, with as many steps in it as it is compiled."""
        original(self._model, f"make_{kind}_function")(force=True)
        function: Callable[[Any], Any] = getattr(self._model, f"{kind}_function")
        return function

    def local_data(self, batch: Any) -> Any:
        return batch

    @contextmanager
    def trying(self) -> Iterator[None]:
        """As the first replica, whose copies of variables are used and restored."""
        first = tf.distribute.ReplicaContext(self._strategy, replica_id_in_sync_group=0)
        with first, tf.device(self._strategy.extended.worker_devices[0]):
            yield

    # -- steps ---------------------------------------------------------------------------------

    def _step(self, name: str) -> Callable[[Any], Any]:
        def step(data: Any) -> Any:
            def on_replica(replica: TensorFlowReplica) -> Any:
                with after_data(data):
                    return self._replication.run(name, replica.own_rows(data))

            return keras.tree.map_structure(
                lambda value: self._strategy.experimental_local_results(value)[0],
                self._run(on_replica, data),
            )

        return step

    def _predict_step(self, data: Any) -> Any:
        every: list[Any] = []  # The outputs of each replica, in order.

        def on_replica(replica: TensorFlowReplica) -> Any:
            outputs = original(self._model, "predict_step")(replica.own_rows(data))
            every.append(outputs)
            # As dense components: tf.distribute does not support ragged and sparse tensors.
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
            links = LinksInProcess(self.placement.num_replicas)
            with threads.replica(), running(TensorFlowReplica(count, links)) as replica:
                return on_replica(replica)

        results = self._strategy.run(run)
        threads.finish()
        if tf.inside_function():  # Being traced.
            graph = tf.compat.v1.get_default_graph()
            problem = shared_write(graph, self._variables())
            if problem is not None:
                raise ModelError(problem)
        return results


def _with_first(batch: Any, iterator: Any, num_batches: int) -> Any:
    """An iterator over `num_batches` batches, of which the first has been taken already."""
    rest = itertools.islice(iterator, num_batches - 1)
    if not isinstance(iterator, tf.data.Iterator):
        return itertools.chain([batch], rest)
    # Of the type for which Keras traces its function anyway: a batch by itself has a static number
    # of rows, and would be traced separately.
    return iter(
        tf.data.Dataset.from_generator(
            lambda: itertools.chain([batch], rest), output_signature=iterator.element_spec
        )
    )


# -- strategies of tf.distribute ------------------------------------------------------------------


class UnscaledMirroredStrategy(tf.distribute.MirroredStrategy):
    """TensorFlow's, but inside a step Keras must not divide losses by the number of replicas."""

    def __init__(self, placement: Placement) -> None:
        # By default all strategies use the same collective keys, and two of them would deadlock.
        self._collective_key_base = 1_000_000 * (len(_strategies) + 1)
        self.is_merging = placement.kind == "cpu"
        """Whether replicas reduce in cross-replica context, and not by a collective."""
        devices = [f"{placement.kind.upper()}:{i}" for i in placement.indices]
        super().__init__(devices, cross_device_ops=_reduction(placement))

    @property
    def num_replicas_in_sync(self) -> int:
        replica = current_replica()
        is_trainers_step = replica is not None and not replica.is_custom_loop
        return 1 if is_trainers_step else super().num_replicas_in_sync


def _reduction(placement: Placement) -> Any:
    """How replicas of a process reduce; None for TensorFlow's own choice."""
    if placement.kind == "cpu":
        # Virtual CPU devices share their memory, so that a reduction needs no collective.
        return tf.distribute.ReductionToOneDevice()
    physical, visible, logical = (
        len(list_devices("GPU"))
        for list_devices in (
            tf.config.list_physical_devices,
            tf.config.get_visible_devices,
            tf.config.list_logical_devices,
        )
    )
    # Where `set_visible_devices` has hidden a GPU, TensorFlow takes the others for parts of GPUs,
    # which NCCL does not support, and reduces on one GPU.
    is_misjudged = physical != logical == visible
    return tf.distribute.NcclAllReduce() if is_misjudged else None


def strategy_of(placement: Placement) -> tf.distribute.Strategy:
    """The one strategy of a placement, shared by all models on it."""
    if placement not in _strategies:
        _strategies[placement] = UnscaledMirroredStrategy(placement)
    return _strategies[placement]


def check_strategy(model: Any) -> None:
    """Raise ModelError if a model belongs to a user's own strategy of tf.distribute."""
    for strategy in _strategies_around(model):
        # TensorFlow has a class for "no strategy".
        is_none = strategy is None or type(strategy).__name__ == "_DefaultDistributionStrategy"
        if not (is_none or isinstance(strategy, UnscaledMirroredStrategy)):
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
