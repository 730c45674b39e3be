"""What both trainers of this backend share: Keras' hooks, building, and learning of loss kinds.

The replicas of a step live in this process (mirrored) or in one process each (multi_process). In
both, Keras' functions run the step of `Replication` on a replica's rows. All variables are created
before a step is traced, where replicas could not create them.
"""

import abc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from unisono.backends.tensorflow.replica import (
    COMPOSITES,
    TensorFlowReplica,
    after_data,
    current_replica,
    join_rows,
    num_rows,
    rows_between,
    running,
)
from unisono.backends.tensorflow.variables import forget_functions
from unisono.data.feed import Feed, Shard
from unisono.devices import Placement
from unisono.hooks import bind, original, unbind
from unisono.replication.checksums import names_of, own_checksums
from unisono.replication.introspection import optimizers_of
from unisono.replication.loss_check import find_kinds
from unisono.replication.loss_kinds import LossKinds
from unisono.replication.loss_trials import Gathers, TrialRows
from unisono.replication.replication import Replication
from unisono.replication.step import StepState

_STEPS = ("train_step", "test_step")
_HOOKS = (
    *_STEPS,
    "predict_step",
    "make_train_function",
    "make_test_function",
    "make_predict_function",
    "_maybe_symbolic_build",
)


class SingleReplica:
    """One replica on the default device: plain Keras, but that the end of data is no step."""

    feed: Feed | None = None

    def __init__(self, model: keras.Model, placement: Placement, *, sync_batch_norm: bool) -> None:
        self.placement = placement
        self.sync_batch_norm = sync_batch_norm
        self._model = model
        for name in _STEPS:
            bind(model, name, self._step(name))
        forget_functions(model)

    def _step(self, name: str) -> Callable[[Any], Any]:
        def step(data: Any) -> Any:
            with after_data(data):
                return original(self._model, name)(data)

        return step

    def release(self) -> None:
        unbind(self._model, *_STEPS)
        forget_functions(self._model)

    def settle(self, when: str) -> None:
        """One process has nothing to agree on."""

    def variable_names(self) -> list[str]:
        return names_of(self._model)

    def checksums(self) -> list[list[int]]:
        return [own_checksums(self._model)]


class Trainer(abc.ABC):
    """Hooks on a model whose steps run on several replicas; see base.ReplicatedModel."""

    feed: Feed | None = None
    """The source of this process' shards in a run of several processes."""

    def __init__(self, model: keras.Model, placement: Placement, *, sync_batch_norm: bool) -> None:
        self.placement = placement
        self.sync_batch_norm = sync_batch_norm
        self._model = model
        self._own_jit_compile = model._jit_compile
        self.hook_optimizers()
        self._replication = Replication(model, current_replica, sync_batch_norm=sync_batch_norm)
        bind(model, "make_train_function", self._maker("train"))
        bind(model, "make_test_function", self._maker("test"))
        bind(model, "make_predict_function", self._make_predict_function)
        bind(model, "_maybe_symbolic_build", self._build)
        forget_functions(model)
        self.prepare()

    def prepare(self) -> None:
        """Hook whatever the model has now, and make its variables those of replicas."""
        self._model._jit_compile = False  # XLA can span neither devices nor processes here.
        self.hook_optimizers()
        self._replication.prepare()
        self.take_variables()

    def release(self) -> None:
        self._replication.release()
        unbind(self._model, *_HOOKS)
        self._model._jit_compile = self._own_jit_compile
        forget_functions(self._model)

    @abc.abstractmethod
    def settle(self, when: str) -> None:
        """Have all processes take over the chief's values; `when` names it in errors."""

    def variable_names(self) -> list[str]:
        return names_of(self._model)

    def checksums(self) -> list[list[int]]:
        return [own_checksums(self._model)]

    # -- what the trainers differ in -----------------------------------------------------------

    @abc.abstractmethod
    def hook_optimizers(self) -> None:
        """Hook optimizers, before the replication does."""

    @abc.abstractmethod
    def take_variables(self) -> None:
        """Make the model's present variables those of replicas."""

    @abc.abstractmethod
    def function(self, name: str) -> Callable[[Any], Any]:
        """Keras' function that takes batches of an iterator and runs `name`, a step, on them."""

    @abc.abstractmethod
    def predict_function(self) -> Callable[[Any], Any]:
        """Keras' function that predicts for a list of batches."""

    @abc.abstractmethod
    def local_data(self, batch: Any) -> Any:
        """The rows of a batch that this process has."""

    def trying(self) -> AbstractContextManager[Any]:
        """The context in which a step is tried on a few rows."""
        return nullcontext()

    def agreed(self, name: str, kinds: LossKinds) -> LossKinds:
        """What all processes found out about the losses of a step."""
        return kinds

    # -- functions -----------------------------------------------------------------------------

    def _maker(self, kind: str) -> Callable[..., Any]:
        """Keras' `make_train_function` or `make_test_function`."""
        model, attribute = self._model, f"{kind}_function"

        def make(force: bool = False) -> Any:
            if getattr(model, attribute) is None or force:
                setattr(model, attribute, self.function(f"{kind}_step"))
            return getattr(model, attribute)

        return make

    def _make_predict_function(self, force: bool = False) -> Any:
        model = self._model
        self.prepare()  # Another model that shares layers may have moved them elsewhere.
        if model.predict_function is None or force:
            predict = self.predict_function()

            def build_first(batches: Any) -> Any:
                # Here and not in the step: a variable made while that is traced has no copies.
                if not model.built:
                    self._build_for_prediction(self.local_data(batches[0]))
                return predict(batches)

            model.predict_function = build_first
        return model.predict_function

    def must_learn(self, name: str) -> bool:
        return self._replication.must_learn(name)

    def learn_kinds(self, name: str, batch: Any) -> None:
        """Find out, before a step is traced, whether its losses are means or sums."""
        self._replication.prepare()
        with self.trying():
            kinds = self._tried(name, self.local_data(batch))
        self._replication.learn(name, self.agreed(name, kinds))

    def _tried(self, name: str, data: Any) -> LossKinds:
        """Try a step on the first rows of some data, eagerly: a trace would take longer."""

        def try_step(rows: TrialRows, gathers: Gathers, state: StepState) -> None:
            count = gathers.num_rows
            parts = keras.tree.map_structure(lambda leaf: _parts(leaf, rows.parts, count), data)
            replica = _TrialReplica(tf.constant(2 * count), _TrialLinks(rows, gathers))
            replica.state = state
            with running(replica):
                self._replication.run(name, parts)
                replica.all_reduce([])  # Runs what is still postponed.

        return find_kinds(self._model, name, int(num_rows(data)), try_step)

    # -- building ------------------------------------------------------------------------------

    def _build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Keras' `_maybe_symbolic_build`, from a batch or from the specification of the data."""
        model = self._model
        if data_batch is None:
            # Not by a batch: taking one changes the order of a PyDataset with workers.
            spec = iterator._distributed_dataset.element_spec
            data_batch = spec.data if isinstance(spec, Shard) else spec
        data_batch = keras.tree.map_structure(
            lambda leaf: None if isinstance(leaf, tf.NoneTensorSpec) else leaf, data_batch
        )
        has_own_step = type(model).train_step is not keras.Model.train_step
        if _has_composites(data_batch):
            if not _is_built(model):
                _trace_alone(model, "train_step" if has_own_step else "test_step", data_batch)
                if model.optimizer is not None and not model.optimizer.built:
                    model.optimizer.build(model.trainable_variables)
                model._post_build()
            self.prepare()
            return
        try:
            model._symbolic_build(data_batch=data_batch)
        except RuntimeError:
            if not has_own_step:
                raise
            # A model with its own `train_step` needs no `call`, by which Keras would build it.
        self.prepare()
        if has_own_step and not all(o.built for o in optimizers_of(model)):
            _trace_alone(model, "train_step", data_batch)
            self.prepare()

    def _build_for_prediction(self, data: Any) -> None:
        """Build a model that predicts before it is trained."""
        if _has_composites(data):
            _trace_alone(self._model, "predict_step", data)
        else:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            spec = keras.tree.map_structure(
                lambda t: keras.KerasTensor(t.shape, keras.backend.standardize_dtype(t.dtype)), x
            )
            keras.src.backend.compute_output_spec(self._model, spec, training=False)
        self.prepare()


def _has_composites(data_batch: Any) -> bool:
    """Whether data is ragged or sparse, which Keras' symbolic build does not support."""
    kinds = (*COMPOSITES, tf.RaggedTensorSpec, tf.SparseTensorSpec)
    return any(isinstance(leaf, kinds) for leaf in keras.tree.flatten(data_batch))


def _is_built(model: Any) -> bool:
    parts = [*model._flatten_layers(), model._compile_metrics, model._compile_loss]
    return all(part.built for part in [*parts, *optimizers_of(model)] if part is not None)


def _trace_alone(model: Any, name: str, data_batch: Any) -> None:
    """Trace a step as on one device, which creates the variables that it needs."""
    step = model._autoconvert_optionals(original(model, name))
    tf.function(step, autograph=False).get_concrete_function(data_batch)


# -- a step that is tried -------------------------------------------------------------------------


class _TrialLinks:
    """Those of one of the replicas of a trial; see replica.Links."""

    def __init__(self, rows: TrialRows, gathers: Gathers) -> None:
        self.index = rows.index
        self.num_replicas = rows.num_replicas
        self._gathers = gathers

    def all_reduce(self, operands: Sequence[Any]) -> list[Any]:
        return [self._sum(operand) for operand in operands]

    def gather(self, x: Any, num_rows: Any, is_replicated: Any) -> Any:
        return join_rows(self._gathers.every(x, rows_between))

    def _sum(self, operand: Any) -> Any:
        factor = tf.cast(self._gathers.num_same, operand.dtype)
        if isinstance(operand, tf.IndexedSlices):
            return tf.IndexedSlices(operand.values * factor, operand.indices, operand.dense_shape)
        return operand * factor


class _TrialReplica(TensorFlowReplica):
    """One of them."""

    def stack(self, x: Any) -> Any:
        # By symmetry, the gradient of a twin's loss with respect to this replica's entry is that
        # of this replica's loss with respect to the twin's entry.
        return tf.stack([x] * self._num_replicas)


def _parts(leaf: Any, places: Sequence[int], count: int) -> Any:
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    return join_rows([rows_between(leaf, place * count, (place + 1) * count) for place in places])
