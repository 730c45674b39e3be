"""TensorFlow: one process, tf.distribute runs the replicas of a step.

The model is adopted where it stands: each Keras variable's tf.Variable becomes a MirroredVariable
whose copies are written by their own replica (aggregation NONE), and gradients are summed at the
entry of `optimizer.apply`. The data pipeline stays a plain tf.data iterator; a step slices the
global batch itself. Only the replica context's all_reduce and all_gather are used, so the same
code runs under a multi-worker strategy.
"""

import gc
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from tensorflow.python.distribute.distribute_lib import get_update_replica_id
from tensorflow.python.distribute.values import MirroredVariable

from unisono.data import share_bounds
from unisono.devices import Placement
from unisono.engines.hooks import bind, original, unbind
from unisono.engines.replication import (
    SEED_STRIDE,
    Replication,
    StepState,
    optimizers_of,
    rename_variables,
    seed_states,
    with_inner,
)
from unisono.errors import StartedError

_STEPS = ("train_step", "test_step")
_HOOKS = (*_STEPS, "predict_step", "make_predict_function", "_maybe_symbolic_build")
# Keras' TensorFlow optimizer reduces and merges by itself in these; we have reduced already.
_OPTIMIZER_PARTS = (
    "add_variable_from_reference",
    "_backend_update_step",
    "_apply_weight_decay",
    "_overwrite_model_variables_with_average_value",
    "_backend_increment_gradient_accumulators",
)
_running = threading.local()
_strategies: dict[Placement, tf.distribute.Strategy] = {}


class TensorFlowEngine:
    """Replicas under a mirrored strategy."""

    backend = "tensorflow"

    def num_gpus(self) -> int:
        return len(tf.config.list_physical_devices("GPU"))

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

    def adopt(
        self, model: keras.Model, placement: Placement, *, sync_batch_norm: bool
    ) -> "SingleReplica | TensorFlowReplicas":
        if placement.num_replicas == 1 and placement.indices == (0,):
            return SingleReplica(placement, sync_batch_norm)
        return TensorFlowReplicas(model, placement, sync_batch_norm=sync_batch_norm)


class SingleReplica:
    """One replica on the default device: plain Keras, with nothing added."""

    def __init__(self, placement: Placement, sync_batch_norm: bool) -> None:
        self.placement = placement
        self.sync_batch_norm = sync_batch_norm

    def release(self) -> None:
        """There is nothing to undo."""


class MirroredStrategy(tf.distribute.MirroredStrategy):
    """TensorFlow's, but inside a step Keras must not divide losses by the number of replicas."""

    def __init__(self, placement: Placement) -> None:
        # Strategies number their collectives alike, and two with one number stop each other.
        self._collective_key_base = 1_000_000 * (len(_strategies) + 1)
        devices = [f"{placement.kind.upper()}:{i}" for i in placement.indices]
        # Virtual CPU devices share their memory: adding up there needs no collective at all.
        reduction = tf.distribute.ReductionToOneDevice() if placement.kind == "cpu" else None
        super().__init__(devices, cross_device_ops=reduction)

    @property
    def num_replicas_in_sync(self) -> int:
        return 1 if current_replica() is not None else super().num_replicas_in_sync


def strategy_of(placement: Placement) -> tf.distribute.Strategy:
    """The one strategy of a placement, shared by all models on it."""
    if placement not in _strategies:
        _strategies[placement] = MirroredStrategy(placement)
    return _strategies[placement]


class PlainLookingVariable(MirroredVariable):
    """A mirrored variable that can be used where a plain tf.Variable can.

    Callbacks say `float(model.optimizer.learning_rate)`, and a plain model may share layers.
    """

    def __int__(self) -> int:
        return int(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def _update(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        if get_update_replica_id() is None or isinstance(get_update_replica_id(), int):
            return super()._update(update_fn, value, **kwargs)
        # The optimizer of a plain model, which trains this variable too: all copies follow.
        with self.distribute_strategy.scope():
            return self._update_cross_replica(update_fn, value, **kwargs)

    def __complex__(self) -> complex:
        return complex(self.numpy())

    def __bool__(self) -> bool:
        return bool(self.numpy())


class TensorFlowReplicas:
    """A model whose variables are mirrored and whose steps run on every replica."""

    def __init__(
        self,
        model: keras.Model,
        placement: Placement,
        *,
        sync_batch_norm: bool,
        strategy: tf.distribute.Strategy | None = None,
    ) -> None:
        self.placement = placement
        self.sync_batch_norm = sync_batch_norm
        self._strategy = strategy or strategy_of(placement)
        # Of all processes, should the strategy span several.
        self._num_replicas = self._strategy.num_replicas_in_sync
        self._model = model
        self._replication = Replication(model, current_replica, sync_batch_norm=sync_batch_norm)
        self._own_jit_compile = model._jit_compile
        for name in _STEPS:
            bind(model, name, self._step(name))
        bind(model, "predict_step", self._predict_step)
        bind(model, "make_predict_function", self._make_predict_function)
        bind(model, "_maybe_symbolic_build", self._build)
        _forget_functions(self._model)
        self._mirror()

    def release(self) -> None:
        self._replication.release()
        unbind(self._model, *_HOOKS)
        for optimizer in with_inner(optimizers_of(self._model)):
            unbind(optimizer, *_OPTIMIZER_PARTS, "_tf_apply")
        self._replace_variables(_plain_copy)
        self._model._jit_compile = self._own_jit_compile
        _forget_functions(self._model)

    # -- adopting ------------------------------------------------------------------------------

    def _build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Create all variables before a step is traced, where replicas could not."""
        if data_batch is None:
            for _, _, batches in iterator:
                # No data at all is no error: what the data would look like is known.
                data_batch = next(batches, batches.element_spec)
                break
        model = self._model
        has_own_step = type(model).train_step is not TensorFlowTrainer.train_step
        try:
            model._symbolic_build(data_batch=data_batch)
        except RuntimeError:
            if not has_own_step:
                raise
            # A model with steps of its own needs no `call`, which Keras would build it by.
        self._mirror()
        if has_own_step and not all(o.built for o in optimizers_of(model)):
            self._trace_alone(data_batch)
            self._mirror()

    def _trace_alone(self, data_batch: Any) -> None:
        """Trace a user's own step as on one device: so it makes the variables that it needs."""
        step = self._model._autoconvert_optionals(original(self._model, "train_step"))
        tf.function(step, autograph=False).get_concrete_function(data_batch)

    def _mirror(self) -> None:
        self._model._jit_compile = False  # XLA cannot span the devices of a strategy.
        self._replication.prepare()
        for optimizer in with_inner(optimizers_of(self._model)):
            for name in _OPTIMIZER_PARTS:
                bind(optimizer, name, _past_tensorflow(type(optimizer), name).__get__(optimizer))
            if isinstance(optimizer, LossScaleOptimizer):
                bind(optimizer, "_tf_apply", optimizer._common_apply)
        with tf.init_scope():
            self._replace_variables(self._mirrored_copy)
            for state in seed_states(self._model):
                self._spread_seed(state)

    def _replace_variables(self, copy: Callable[[Any], Any]) -> None:
        """Give every variable a new tf.Variable, and optimizers the keys that go with them."""
        model = self._model
        variables = list(model.variables)
        # A user's `metrics` may need what their `compile` makes.
        variables += model.metrics_variables if model.compiled else []
        for optimizer in with_inner(optimizers_of(model)):
            variables += optimizer.variables
        variables = [v for v in variables if v._value is not None]
        copies = [copy(variable) for variable in variables]
        pairs = zip(variables, copies, strict=True)
        changed = {id(v): (v, new) for v, new in pairs if v._value is not new}
        if not changed:
            return
        has_moved = any(isinstance(v._value, MirroredVariable) for v, _ in changed.values())
        models = [model, *_other_models_with(changed, model)]
        optimizers = [o for one in models for o in with_inner(optimizers_of(one))]
        keys = [{id(v): o._var_key(v) for v, _ in changed.values()} for o in optimizers]
        for variable, new in changed.values():
            variable._value = new
        for optimizer, before in zip(optimizers, keys, strict=True):
            renamed = {before[id(v)]: optimizer._var_key(v) for v, _ in changed.values()}
            rename_variables(optimizer, renamed)
        for one in models if has_moved else models[1:]:
            _forget_functions(one)

    def _mirrored_copy(self, variable: Any) -> Any:
        value = variable._value
        if isinstance(value, MirroredVariable) and value.distribute_strategy is self._strategy:
            return value
        initial = value.numpy()  # Read out here: it may belong to the scope of another strategy.
        with self._strategy.scope():
            mirrored = tf.Variable(
                initial,
                dtype=value.dtype,
                # Not the Keras variable's: a layer that is frozen now may be thawed later, and
                # TensorFlow's own flag says for good whether a gradient can be taken.
                trainable=value.trainable,
                name=variable.name,
                aggregation=tf.VariableAggregation.NONE,
                synchronization=tf.VariableSynchronization.ON_WRITE,
            )
        mirrored.__class__ = PlainLookingVariable
        return mirrored

    def _spread_seed(self, state: Any) -> None:
        """Replicas other than the first draw from streams of their own."""
        values = state._value.values
        first = values[0].numpy()
        for replica, value in enumerate(values[1:], start=1):
            value.assign([first[0] + replica * SEED_STRIDE, first[1]])

    # -- steps ---------------------------------------------------------------------------------

    def _step(self, name: str) -> Callable[[Any], Any]:
        def step(data: Any) -> Any:
            def on_replica() -> Any:
                return self._replication.run(name, _running.replica.own_rows(data))

            return self._first(self._run(on_replica, data))

        return step

    def _make_predict_function(self, force: bool = False) -> Any:
        model = self._model
        self._mirror()  # Another model that shares layers may have taken them elsewhere.
        if model.predict_function is None or force:
            original(model, "make_predict_function")(force=True)
            predict = model.predict_function

            def build_first(data: Any) -> Any:
                # Here and not in the step: a variable made while that is traced has no copies.
                if not model.built:
                    self._build_for_prediction(data[0])
                return predict(data)

            model.predict_function = build_first
        return model.predict_function

    def _predict_step(self, data: Any) -> Any:
        def on_replica() -> Any:
            return original(self._model, "predict_step")(_running.replica.own_rows(data))

        num_rows = _num_rows(data)

        def join(value: Any) -> Any:
            parts = self._strategy.experimental_local_results(value)
            return tf.concat(parts, axis=0)[:num_rows]

        return keras.tree.map_structure(join, self._run(on_replica, data))

    def _build_for_prediction(self, data: Any) -> None:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        spec = keras.tree.map_structure(
            lambda t: keras.KerasTensor(t.shape, keras.backend.standardize_dtype(t.dtype)), x
        )
        keras.src.backend.compute_output_spec(self._model, spec, training=False)
        self._mirror()

    def _run(self, on_replica: Callable[[], Any], data: Any) -> Any:
        num_rows = _num_rows(data)

        def run() -> Any:
            _running.replica = TensorFlowReplica(data, num_rows, self._num_replicas)
            try:
                return on_replica()
            finally:
                _running.replica = None

        return self._strategy.run(run)

    def _first(self, values: Any) -> Any:
        return keras.tree.map_structure(
            lambda value: self._strategy.experimental_local_results(value)[0], values
        )


class TensorFlowReplica:
    """One replica of tf.distribute in the middle of a step; see replication.Replica."""

    def __init__(self, data: Any, num_rows: Any, num_replicas: int) -> None:
        self.state = StepState()
        self._data = [
            leaf for leaf in tf.nest.flatten(data, expand_composites=True) if leaf is not None
        ]
        self._context = tf.distribute.get_replica_context()
        self._index = self._context.replica_id_in_sync_group
        self._num_rows = num_rows
        self._num_replicas = num_replicas
        start, stop = share_bounds(num_rows, num_replicas, self._index)
        # A batch smaller than the replicas runs whole on each.
        is_whole = num_rows < num_replicas
        self._start = tf.where(is_whole, 0, start)
        self._stop = tf.where(is_whole, num_rows, stop)
        rows = tf.cast(self._stop - self._start, tf.float32)
        fraction = rows / tf.cast(num_rows, tf.float32)
        self.share = tf.where(is_whole, 1.0 / num_replicas, fraction)
        self.metric_factor = tf.where(is_whole, 1.0 / num_replicas, 1.0)
        self._gradient_scale = tf.where(is_whole, 1.0, 1.0 / self.share)
        self._rows_after = tf.where(is_whole, self._stop, num_rows)

    def after_data(self) -> AbstractContextManager[Any]:
        dependencies: AbstractContextManager[Any] = tf.control_dependencies(self._data)
        return dependencies

    def own_rows(self, data: Any) -> Any:
        def rows(leaf: Any) -> Any:
            if leaf is None:
                return None
            if isinstance(leaf, tf.SparseTensor):
                begin = tf.concat([[self._start], tf.zeros_like(leaf.dense_shape[1:], tf.int32)], 0)
                size = tf.concat(
                    [[self._stop - self._start], tf.cast(leaf.dense_shape[1:], tf.int32)], 0
                )
                return tf.sparse.slice(leaf, tf.cast(begin, tf.int64), tf.cast(size, tf.int64))
            return leaf[self._start : self._stop]

        # Sliced before it travels: a device gets its own rows only.
        with tf.device("CPU:0"):
            return keras.tree.map_structure(rows, data)

    def gather_rows(self, x: Any) -> Any:
        is_bool = x.dtype == tf.bool
        every = self._context.all_gather(tf.cast(x, tf.int32) if is_bool else x, axis=0)
        every = tf.stop_gradient(tf.cast(every, x.dtype))
        return tf.concat([every[: self._start], x, every[self._stop : self._rows_after]], axis=0)

    def follow_changes(self, own: Any, gathered: Any) -> None:
        """Tensors of a graph cannot be changed."""

    def with_global_gradient(self, loss: Any) -> Any:
        scaled = loss * tf.cast(self._gradient_scale, loss.dtype)
        return scaled + tf.stop_gradient(loss - scaled)

    def stack(self, x: Any) -> Any:
        @tf.custom_gradient
        def stacked(x: Any) -> Any:
            every = self._context.all_gather(x[tf.newaxis], axis=0)

            def gradient(upstream: Any) -> Any:
                if self.state.weighted_optimizers:
                    return self.total([upstream])[0][self._index]
                share = tf.cast(self.share, upstream.dtype)
                return self.total([upstream * share])[0][self._index] / share

            return every, gradient

        return stacked(x)

    def total(self, tensors: Sequence[Any]) -> list[Any]:
        # Alone on a device other than the first, there is nobody to add up with.
        if not tensors or self._num_replicas == 1:
            return list(tensors)
        return list(self._context.all_reduce(tf.distribute.ReduceOp.SUM, list(tensors)))

    def reduce_gradients(
        self, gradients: Sequence[Any], variables: Sequence[Any], weight: Any
    ) -> list[Any]:
        known = [_weighted(g, weight) for g in gradients if g is not None]
        totals = iter(self.total(known))
        return [None if g is None else next(totals) for g in gradients]


def _weighted(gradient: Any, weight: Any) -> Any:
    weight = tf.cast(weight, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        # Kept sparse: Keras' optimizers update only the rows that were used.
        return tf.IndexedSlices(gradient.values * weight, gradient.indices, gradient.dense_shape)
    return gradient * weight


def _forget_functions(model: keras.Model) -> None:
    """Have a model trace its steps again: those of before hold on to other variables."""
    model.train_function = None
    model.test_function = None
    model.predict_function = None


def _other_models_with(variables: dict[int, Any], model: keras.Model) -> Iterator[keras.Model]:
    """Models that share one of these variables. There is no register of models."""
    for other in gc.get_objects():
        is_model = issubclass(type(other), keras.Model) and other is not model
        if is_model and any(id(variable) in variables for variable in other.variables):
            yield other


def _past_tensorflow(cls: type, name: str) -> Any:
    """A method of an optimizer class that knows nothing of Keras' TensorFlow version of it."""
    method = getattr(cls, name)
    if method is getattr(TFOptimizer, name):
        return getattr(BaseOptimizer, name)
    if "__class__" not in method.__code__.co_freevars:
        return method
    # One that overrides it and goes on to it with `super()`, as Nadam does: `super()` looks behind
    # the class in this cell.
    cells = zip(method.__code__.co_freevars, method.__closure__, strict=True)
    closure = tuple(
        types.CellType(TFOptimizer) if cell_name == "__class__" else cell
        for cell_name, cell in cells
    )
    return types.FunctionType(
        method.__code__, method.__globals__, name, method.__defaults__, closure
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


def current_replica() -> TensorFlowReplica | None:
    """The replica whose step this thread is tracing or running."""
    return getattr(_running, "replica", None)


def _num_rows(data: Any) -> Any:
    leaf = next(leaf for leaf in keras.tree.flatten(data) if leaf is not None)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return leaf.nrows(tf.int32) if isinstance(leaf, tf.RaggedTensor) else tf.shape(leaf)[0]


def _plain_copy(variable: Any) -> Any:
    return tf.Variable(
        variable._value.numpy(),
        dtype=variable._value.dtype,
        trainable=variable._value.trainable,
        name=variable.name,
    )
