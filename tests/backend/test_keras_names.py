"""Every name that the engines use and that Keras or a backend does not promise, in one table.

A new release that moves one fails here first, with a message that says who uses it and for what.
"""

import ast
import importlib
import inspect
import itertools
import random
import re
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import unisono
from unisono.keras_internals import partial_batches, torch_device

BACKEND = keras.backend.backend()
X, Y = np.ones((6, 4), "float32"), np.ones((6, 1), "float32")


@dataclass(frozen=True)
class Name:
    """One name: where it is used, what for, and a check that it is still what it was."""

    name: str
    used_by: str
    purpose: str
    check: Callable[[Any], bool]
    backends: tuple[str, ...] = ("jax", "tensorflow", "torch")


@pytest.fixture(scope="module")
def model():
    """A plain model with a bit of everything, trained for a step."""
    block = keras.Sequential([keras.layers.Dense(3), keras.layers.BatchNormalization(name="norm")])
    layers = [keras.Input((4,)), block, keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_list=[block.layers[0].kernel])
    model.compile(optimizer, "mse", metrics=["mae"])
    model.fit(X, Y, validation_data=(X, Y), verbose=0)
    return model


def lookup(path: str) -> Any:
    """`module:attribute.attribute` as an object."""
    module, _, attributes = path.partition(":")
    found = importlib.import_module(module)
    for attribute in filter(None, attributes.split(".")):
        found = getattr(found, attribute)
    return found


def takes(function: Any, *parameters: str) -> bool:
    """Whether a function's parameters begin with these (`self` left out)."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    return tuple(names[: len(parameters)]) == parameters


def has_signature(path: str, *parameters: str) -> Callable[[Any], bool]:
    return lambda model: takes(lookup(path), *parameters)


def norm_of(model: Any) -> Any:
    return next(layer for layer in model._flatten_layers() if layer.name == "norm")


def is_used_in_call(layer: Any) -> bool:
    calls = []
    moments = layer._moments
    vars(layer)["_moments"] = lambda *args: calls.append(1) or moments(*args)
    try:
        layer(np.ones((2, 3), "float32"), training=True)
    finally:
        vars(layer).pop("_moments")
    return bool(calls)


def is_used_by_convolution(layer: Any) -> bool:
    calls = []
    convolve = layer.convolution_op
    vars(layer)["convolution_op"] = lambda *args: calls.append(1) or convolve(*args)
    layer(np.ones((1, 2, 2, 1), "float32"))
    return bool(calls)


def is_read_from_instance(attribute: str) -> Callable[[Any], bool]:
    """Whether Keras calls a method through the object, so that one bound there is used."""

    def check(model: Any) -> bool:
        calls = []
        method = getattr(model, attribute)
        vars(model)[attribute] = lambda *args, **kwargs: calls.append(1) or method(*args, **kwargs)
        try:
            model.train_function = model.test_function = model.predict_function = None
            model.fit(X, Y, verbose=0)
            model.predict(X, verbose=0)
        finally:
            vars(model).pop(attribute)
            model.train_function = model.test_function = model.predict_function = None
        return bool(calls)

    return check


def swaps_value(model: Any) -> bool:
    """Whether another `_value` is all that it takes to give a variable another value."""
    variable = model.layers[-1].bias
    value = variable._value
    variable.assign(keras.ops.ones_like(value) * 7)
    other, variable._value = variable._value, value
    variable._value = other
    return float(keras.ops.convert_to_numpy(variable)[0]) == 7.0


def excludes_by_key(model: Any) -> bool:
    optimizer = model.optimizer
    kernel = model.layers[0].layers[0].kernel
    key = optimizer._var_key(kernel)
    if "_weight_decay_by_var_key" in vars(optimizer):  # Since Keras 3.16.
        return not optimizer._weight_decay_by_var_key[key]
    is_listed = optimizer._exclude_from_weight_decay == {key}
    return is_listed and set(optimizer._exclude_from_weight_decay_cache.values()) == {True, False}


def keeps_default_of_tables(model: Any) -> bool:
    table = keras.layers.IntegerLookup(vocabulary=[3, 5]).lookup_table
    return int(table._default_value) == -1 or int(table._default_value) == 0


def knows_indices_by_key(model: Any) -> bool:
    optimizer = model.optimizer
    keys = [optimizer._var_key(variable) for variable in optimizer._trainable_variables]
    return optimizer._trainable_variables_indices == {key: i for i, key in enumerate(keys)}


def routes_by_key(model: Any) -> bool:
    sgd = keras.optimizers.SGD(0.1)
    several = keras.optimizers.MultiOptimizer(lambda variable: sgd)
    several.build(model.trainable_variables)
    keys = {several._var_key(variable) for variable in model.trainable_variables}
    return several._var_to_optimizer_idx == dict.fromkeys(keys, 0) and several.optimizers == [sgd]


def restores_through_the_variable(model: Any) -> bool:
    import tensorflow as tf

    calls = []
    variable = tf.Variable(1.0)

    class Noting(type(variable)):
        def _restore_from_tensors(self, tensors: Any) -> Any:
            calls.append(1)
            return super()._restore_from_tensors(tensors)

    variable.__class__ = Noting
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(variable=variable).write(f"{folder}/checkpoint")
        tf.train.Checkpoint(variable=variable).read(path)
    return calls == [1]


def evaluates_at_each_call(model: Any) -> bool:
    import tensorflow as tf

    count = itertools.count()
    spec = tf.TensorSpec([], tf.int32)

    def number() -> Any:
        graph = tf.compat.v1.get_default_graph()
        return graph.capture_call_time_value(lambda: tf.constant(next(count)), spec, key="number")

    function = tf.function(lambda: number() + number())
    return [int(function()), int(function())] == [0, 2]


def differs_from_base(part: str) -> Callable[[Any], bool]:
    """Whether TensorFlow's optimizer overrides a part that its base has in the same form."""

    def check(model: Any) -> bool:
        base = getattr(lookup("keras.src.optimizers.base_optimizer:BaseOptimizer"), part)
        own = getattr(lookup("keras.src.backend.tensorflow.optimizer:TFOptimizer"), part)
        parameters = list(inspect.signature(base).parameters)
        return own is not base and list(inspect.signature(own).parameters) == parameters

    return check


def tracks_in_containers(model: Any) -> bool:
    tracking = lookup("keras.src.utils.tracking")
    kinds = (tracking.TrackedList, tracking.TrackedDict, tracking.TrackedSet)
    return [kind.__mro__[1] for kind in kinds] == [list, dict, set]


def counts_writes(model: Any) -> bool:
    value = model.layers[-1].bias._value
    before = value._version
    model.layers[-1].bias.assign(keras.ops.zeros_like(value))
    is_new = model.layers[-1].bias._value is not value
    return is_new or value._version > before


def keeps_validation_data(model: Any) -> bool:
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(vars(model).get("_eval_epoch_iterator")),
    )
    model.fit(X, Y, validation_data=(X, Y), callbacks=[look], verbose=0)
    return seen[0] is not None


def makes_gloo_on_loopback(model: Any) -> bool:
    import torch.distributed as dist

    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return len(options._devices) == 1 and options._timeout is not None


def calls_a_store_of_python(model: Any) -> bool:
    import torch.distributed as dist

    calls = []

    class Store(dist.Store):
        def set(self, key: str, value: Any) -> None:
            calls.append((key, bytes(value)))

    Store().set("a", b"1")
    dist.PrefixStore("p", store := Store()).set("b", "2")
    return calls == [("a", b"1"), ("p/b", b"2")] and isinstance(store, dist.Store)


def becomes_functional(model: Any) -> bool:
    class Own(keras.Model):
        pass

    functional = lookup("keras.src.models.functional:Functional")
    was_functional = issubclass(Own, functional)
    lookup("keras.src.models.model:inject_functional_model_class")(Own)
    return issubclass(Own, functional) and not was_functional


def names_its_backend(model: Any) -> bool:
    dynamic = lookup("keras.src.utils.backend_utils:DynamicBackend")
    return dynamic("torch")._backend == "torch"


def keys_collectives(model: Any) -> bool:
    import tensorflow as tf

    return tf.distribute.MirroredStrategy._collective_key_base == 0


def describes_the_data(model: Any) -> bool:
    import tensorflow as tf

    iterator = lookup("keras.src.backend.tensorflow.trainer:TFEpochIterator")(
        distribute_strategy=tf.distribute.get_strategy(), x=X, batch_size=2
    )
    spec = iterator._distributed_dataset.element_spec
    return spec.shape[1:] == X.shape[1:]


def calls_back_for_each_op(model: Any) -> bool:
    import tensorflow as tf

    seen = []
    callbacks = lookup("tensorflow.python.framework.op_callbacks")

    def callback(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        seen.append((op_type, outputs[0].device[-5:], graph))

    callbacks.add_op_callback(callback)
    try:
        with tf.device("CPU:0"):
            tf.matmul(X, X, transpose_b=True)
    finally:
        callbacks.remove_op_callback(callback)
    tf.add(X, X)
    names = [name.decode() if isinstance(name, bytes) else name for name, _, _ in seen]
    return names[-1] == "MatMul" and {place[1:] for place in seen} == {("CPU:0", None)}


def shares_memory_with_its_tensor(model: Any) -> bool:
    import torch

    tensor = torch.ones(3)
    variable = keras.Variable(tensor)
    same = variable._value.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    return same and torch.ones(3).untyped_storage()._cdata != tensor.untyped_storage()._cdata


def asks_whether_started(model: Any) -> bool:
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized() is True


def keeps_its_run(model: Any) -> bool:
    import jax
    from jax._src import distributed

    state = distributed.global_state
    is_alone = state.client is None and not jax.distributed.is_initialized()
    return is_alone and (state.process_id, state.num_processes) == (0, 1)


def joins_by_hand(model: Any) -> bool:
    from jax._src.lib import _jax

    words = {
        _jax.get_distributed_runtime_client: ("heartbeat_timeout", "shutdown_on_destruction"),
        _jax.get_distributed_runtime_service: ("heartbeat_timeout", "shutdown_timeout"),
        _jax.make_gloo_tcp_collectives: ("distributed_client", "hostname"),
    }
    return all(word in call.__doc__ for call, options in words.items() for word in options)


def starts_its_server(model: Any) -> bool:
    import ctypes

    import tensorflow as tf

    binding = lookup("tensorflow.python.eager.context:pywrap_tfe")
    library = ctypes.CDLL(str(Path(tf.__file__).with_name("libtensorflow_cc.so.2")))
    is_there = callable(binding.TFE_EnableCollectiveOps) and bool(library.TFE_EnableCollectiveOps)
    handle = lookup("tensorflow.python.eager.context:context")()._handle
    return is_there and type(handle).__name__ == "PyCapsule"


def registers_backends(model: Any) -> bool:
    from jax._src import xla_bridge

    takes_collectives = takes(xla_bridge.make_cpu_client, "collectives")
    return takes_collectives and takes(xla_bridge.register_backend_factory, "name", "factory")


def slices_batches(model: Any) -> bool:
    adapters = "keras.src.trainers.data_adapters"
    adapter = lookup(f"{adapters}.array_data_adapter:ArrayDataAdapter")(X, batch_size=4)
    unpack = lookup(f"{adapters}.data_adapter_utils:unpack_x_y_sample_weight")
    return [unpack(batch)[0].shape for batch in adapter.get_jax_iterator()] == [(4, 4), (2, 4)]


def seeds_as_keras_does(model: Any) -> bool:
    def drawn() -> list[float]:
        numbers = [random.random(), float(np.random.rand()), *torch_numbers()]
        return [
            *numbers,
            float(keras.random.uniform(())),
            float(keras.initializers.get("he_normal")((2, 2))[0, 0]),
        ]

    def torch_numbers() -> list[float]:
        return [float(lookup("torch:rand")(()))] if BACKEND == "torch" else []

    keras.utils.set_random_seed(11)
    expected = drawn()
    lookup("unisono.replication.random_state:set_seed")(12)
    others = drawn()
    lookup("unisono.replication.random_state:set_seed")(11)
    return drawn() == expected and others[-1] != expected[-1]


def draws_from_the_global_generator(model: Any) -> bool:
    """Whatever stands in its place is asked for `next(ordered=False)`."""
    if BACKEND == "jax":
        return True  # Nothing is put there.
    name = lookup("keras.src.random.seed_generator:GLOBAL_SEED_GENERATOR")
    state = lookup("keras.src.backend.common:global_state")
    kept, generator = state.get_global_attribute(name), keras.random.SeedGenerator(1)
    state.set_global_attribute(name, generator)
    try:
        before = keras.ops.convert_to_numpy(generator.state).tolist()
        keras.random.normal((2,))
        after = keras.ops.convert_to_numpy(generator.state).tolist()
    finally:
        state.set_global_attribute(name, kept)
    return before != after


def array_adapter() -> Any:
    path = "keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter"
    return lookup(path)(X, Y, batch_size=4, shuffle=True)


def holds_what_it_was_given(model: Any) -> bool:
    adapter = array_adapter()
    facts = (adapter._num_samples, adapter._batch_size, adapter._shuffle)
    return facts == (6, 4, True) and adapter._inputs[0] is X and adapter._inputs[1] is Y


def takes_adapters_as_data(model: Any) -> bool:
    adapters = lookup("keras.src.trainers:data_adapters")
    found = array_adapter()
    return adapters.get_data_adapter(found) is found


def is_where_epochs_look_for_adapters(model: Any) -> bool:
    """Replaced there, Keras' own `fit` uses the replacement."""
    adapters = lookup("keras.src.trainers:data_adapters")
    asked, plain = [], adapters.get_data_adapter
    adapters.get_data_adapter = lambda *args, **kwargs: asked.append(1) or plain(*args, **kwargs)
    try:
        model.evaluate(X, Y, verbose=0)
    finally:
        adapters.get_data_adapter = plain
    return bool(asked)


def slices_sparse_arrays(model: Any) -> bool:
    import tensorflow as tf

    slicing = lookup("keras.src.trainers.data_adapters:array_slicing")
    sparse = tf.sparse.from_dense(X)
    (part,) = keras.tree.flatten(slicing.convert_to_sliceable((sparse,)))
    found = part.convert_to_tf_dataset_compatible(part[np.array([1, 2])])
    is_wrapped = isinstance(found, slicing.TensorflowSparseWrapper)
    return is_wrapped and found.sparse.shape.as_list() == [2, 4]


def reads_arrays_by_their_adapter(model: Any) -> bool:
    """A method bound to the adapter is the one that is called."""
    iterator = lookup("keras.src.backend.tensorflow.trainer:TFEpochIterator")
    adapter = array_adapter()
    plain, calls = adapter.get_tf_dataset, []
    vars(adapter)["get_tf_dataset"] = lambda: calls.append(1) or plain()
    iterator(model.distribute_strategy, x=adapter)
    return bool(calls)


def slices_arrays(model: Any) -> bool:
    slicing = lookup("keras.src.trainers.data_adapters:array_slicing")
    (part,) = keras.tree.flatten(slicing.convert_to_sliceable((X,), target_backend="jax"))
    return part.convert_to_jax_compatible(part[1:3]).shape == (2, 4)


def begins_at_a_restored_epoch(model: Any) -> bool:
    model._initial_epoch = 1
    try:
        history = model.fit(X, Y, epochs=2, verbose=0)
    finally:
        model._initial_epoch = None
    return history.epoch == [1]


def saves_by_a_method(model: Any) -> bool:
    return callable(keras.callbacks.BackupAndRestore("folder")._save_model)


def knows_the_seed(model: Any) -> bool:
    import tensorflow as tf

    tf.random.set_seed(7)
    return lookup("tensorflow.python.eager.context:global_seed")() == 7


def draws_seeds_of_ops_by_a_generator(model: Any) -> bool:
    import tensorflow as tf

    tf.random.set_seed(7)
    generator = lookup("tensorflow.python.eager.context:context")()._rng
    state = generator.getstate()
    tf.random.uniform([3])
    return bool(generator.getstate() != state)


class Adding(keras.layers.Layer):
    """Adds a loss, and has a regularizer."""

    def build(self, shape: Any) -> None:
        self.weight = self.add_weight(shape=(), regularizer=keras.regularizers.L2(0.5))

    def call(self, inputs: Any) -> Any:
        self.add_loss(keras.ops.sum(inputs))
        return inputs


def collects_losses(model: Any) -> bool:
    layer = Adding()
    layer(X)
    is_kept = [float(loss) for loss in layer._losses] == [24.0]
    vars(layer)["_get_regularization_losses"] = list
    return is_kept and len(layer.losses) == 1


def keeps_the_global_seeds(model: Any) -> bool:
    keras.random.normal(())
    attribute = lookup("keras.src.random.seed_generator:GLOBAL_SEED_GENERATOR")
    found = lookup("keras.src.backend.common.global_state:get_global_attribute")(attribute)
    return isinstance(found, keras.random.SeedGenerator)


def tells_what_xla_compiles(model: Any) -> bool:
    import tensorflow as tf

    ask = lookup("tensorflow.python.ops.control_flow_util:GraphOrParentsInXlaContext")
    answers = []

    def traced() -> Any:
        answers.append(bool(ask(tf.compat.v1.get_default_graph())))
        return tf.constant(1.0)

    for is_compiled in (True, False):
        tf.function(traced, jit_compile=is_compiled).get_concrete_function()
    return answers == [True, False]


def knows_whether_it_has_started(model: Any) -> bool:
    from tensorflow.python.eager.context import context

    return context()._initialized is True


def waits_for_cuda(model: Any) -> bool:
    """Where there is no CUDA, a call waits in the queue of those that its start makes."""
    import torch

    calls = []
    num_waiting = len(torch.cuda._queued_calls)
    torch.cuda._lazy_call(lambda: calls.append(1))
    if torch.cuda.is_initialized():
        return calls == [1]
    return calls == [] and len(torch.cuda._queued_calls) == num_waiting + 1


def draws_by_functions_of_the_backend(model: Any) -> bool:
    module = lookup("keras.src.backend:random")
    plain, drawn = module.normal, []
    module.normal = lambda *args, **kwargs: drawn.append(1) or plain(*args, **kwargs)
    try:
        keras.random.normal((2,), seed=1)
    finally:
        module.normal = plain
    return bool(drawn)


def tells_which_resources_are_written(model: Any) -> bool:
    import tensorflow as tf

    tell = lookup(f"{DEPENDENCIES}:get_read_write_resource_inputs")
    variable = tf.Variable(1.0)
    traced = tf.function(lambda: variable.assign_add(variable)).get_concrete_function()
    ops = [op for op in traced.graph.get_operations() if op.type.endswith("VariableOp")]
    return {op.type for op in ops if tell(op)[1]} == {"AssignAddVariableOp"}


def makes_arrays_that_are_not_committed(model: Any) -> bool:
    import jax

    value = jax.device_put(np.ones(2), jax.devices()[0])
    array = lookup("jax._src.array:ArrayImpl")
    moved = array(value.aval, value.sharding, [value], committed=False)
    return bool(value.committed and not moved.committed)


CHECKPOINTS = "tensorflow.python.checkpoint.checkpoint_management"
DEPENDENCIES = "tensorflow.python.framework.auto_control_deps_utils"
JAX, TF, TORCH = ("jax",), ("tensorflow",), ("torch",)
NORM = "keras.layers:BatchNormalization"


def takes_gradients_out_of_step(model: Any) -> bool:
    """Whether a training step gives all its gradients to the optimizer, and what it returns."""
    calls = []

    def stateless_apply(variables: Any, grads: Any, trainable: Any) -> Any:
        calls.append(len(grads))
        return trainable, variables

    state = model._get_jax_state(
        trainable_variables=True,
        non_trainable_variables=True,
        optimizer_variables=True,
        metrics_variables=True,
    )
    vars(model.optimizer)["stateless_apply"] = stateless_apply
    try:
        _, (trainable, _, _, _) = model.train_step(state, (X, Y))
    finally:
        vars(model.optimizer).pop("stateless_apply")
    return calls == [len(trainable)] and trainable is state[0]


def is_compile_of_base(model: Any) -> bool:
    """Whether Keras compiles a loaded model where `compile` is that of the class below Model."""
    owner = next(each for each in type(model).__mro__ if "compile" in vars(each))
    plain, calls = owner.compile, []
    owner.compile = lambda self, *args, **kwargs: calls.append(1) or plain(self, *args, **kwargs)
    try:
        keras.models.clone_model(model).compile_from_config(model.get_compile_config())
    finally:
        owner.compile = plain
    return bool(calls)


def names_velocities(model: Any) -> bool:
    optimizers = [keras.optimizers.SGD(momentum=0.5), keras.optimizers.RMSprop(momentum=0.5)]
    for optimizer in optimizers:
        optimizer.build(model.trainable_variables)
        velocities = [v for v in optimizer.variables if v.name.endswith("_momentum")]
        if len(velocities) != len(model.trainable_variables):
            return False
    return True


def writes_its_note(model: Any) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        backup = keras.callbacks.BackupAndRestore(f"{folder}/backup")
        backup.set_model(model)
        backup._training_metadata_path = f"{folder}/note"
        backup._save_model()
        return Path(folder, "note").read_text().startswith("{")


def makes_temporary_folders(model: Any) -> bool:
    """Whether Keras asks a function of its module for them."""
    module, made = lookup("keras.src.saving.saving_lib"), []
    plain = module.get_temp_dir
    module.get_temp_dir = lambda: made.append(plain()) or made[-1]
    try:
        with tempfile.TemporaryDirectory() as folder:
            model.save(f"{folder}/model.keras")
    finally:
        module.get_temp_dir = plain
    return len(made) == 1


TABLE = [
    Name("_momentum", "horovod", "to correct velocities for a new learning rate", names_velocities),
    Name(
        "compile_from_config",
        "horovod",
        "to see the models that are loaded with a distributed optimizer",
        is_compile_of_base,
    ),
    # -- Keras, on every backend ---------------------------------------------------------------
    Name(
        "_flatten_layers",
        "batch_norm, parts, cpu_layers, torch.model_copy",
        "to find the layers of nested models",
        lambda model: norm_of(model) is model.layers[0].layers[1],
    ),
    Name(
        "keras.layers:Conv2D.convolution_op",
        "cpu_layers",
        "to tell a convolution that is as Keras wrote it, and to compute it in another way on JAX",
        lambda model: (
            takes(keras.layers.Conv2D.convolution_op, "inputs", "kernel")
            and is_used_by_convolution(keras.layers.Conv2D(1, 1))
        ),
    ),
    Name(
        "pool_mode",
        "torch.cpu_layers",
        "to tell pooling by the largest from pooling by the mean",
        lambda model: (
            keras.layers.MaxPooling2D(2).pool_mode == "max"
            and keras.layers.AveragePooling2D(2).pool_mode == "average"
        ),
    ),
    Name(
        "_non_trainable_variables",
        "parts",
        "to average the state of a user's own layer, without that of the layers inside",
        lambda model: (
            len(norm_of(model)._non_trainable_variables) == 2
            and model.layers[0]._non_trainable_variables == []
        ),
    ),
    Name(
        "_reduction_axes",
        "batch_norm, jax.batch_norm",
        "as the axes of the moments",
        lambda model: list(norm_of(model)._reduction_axes) == [0],
    ),
    Name(
        "_moments",
        "batch_norm, jax.batch_norm, tensorflow_kernels",
        "to replace a layer's moments by those of the global batch",
        lambda model: (
            takes(norm_of(model)._moments, "inputs", "mask") and is_used_in_call(norm_of(model))
        ),
    ),
    Name(
        "call",
        "batch_norm, tensorflow_kernels",
        "to normalize groups of rows apart on JAX, and by kernels on TensorFlow",
        has_signature(f"{NORM}.call", "inputs", "training", "mask"),
    ),
    Name(
        "_compile_loss",
        "replication, torch.worker_pool",
        "to compute a loss on all rows",
        lambda model: (
            takes(model._compile_loss.call, "y_true", "y_pred", "sample_weight")
            and model._compile_loss.built
            and isinstance(model._compile_loss.metrics, list)
        ),
    ),
    Name(
        "_flat_losses",
        "parts",
        "to tell plain means of samples from other losses",
        lambda model: (
            [flat.loss.fn.__name__ for flat in model._compile_loss._flat_losses]
            == ["mean_squared_error"]
        ),
    ),
    Name(
        "_fn_kwargs",
        "parts",
        "to see arguments of a loss that make it no plain mean of samples",
        lambda model: (
            keras.losses.SparseCategoricalCrossentropy(ignore_class=2)._fn_kwargs["ignore_class"]
            == 2
        ),
    ),
    Name(
        "keras.src.losses.losses:LossFunctionWrapper",
        "parts",
        "to tell Keras' own losses from a user's class",
        has_signature("keras.src.losses.losses:LossFunctionWrapper.call", "y_true", "y_pred"),
    ),
    Name(
        "keras.src.losses:losses",
        "parts",
        "as the functions behind Keras' own losses",
        lambda model: (
            keras.losses.MeanSquaredError().fn
            is lookup("keras.src.losses.losses:mean_squared_error")
        ),
    ),
    Name(
        "_compile_metrics",
        "parts, torch.worker_pool",
        "to find the metrics that hold state",
        lambda model: [metric.name for metric in model._compile_metrics.metrics] == ["mae"],
    ),
    Name(
        "keras.src.trainers.compile_utils:CompileMetrics",
        "parts",
        "to take the metrics out of their container",
        lambda model: isinstance(
            model._compile_metrics, lookup("keras.src.trainers.compile_utils:CompileMetrics")
        ),
    ),
    Name(
        "_loss_tracker",
        "parts",
        "to count the loss over all rows",
        lambda model: isinstance(model._loss_tracker, keras.metrics.Mean),
    ),
    Name(
        "_fn",
        "parts",
        "to tell metrics of Keras' own functions from those of a user's",
        lambda model: keras.metrics.MeanSquaredError()._fn.__module__.startswith("keras."),
    ),
    Name(
        "get_metrics_result",
        "parts",
        "to add the metrics up before they are read",
        is_read_from_instance("get_metrics_result"),
        ("tensorflow", "torch"),
    ),
    Name(
        "apply",
        "parts",
        "to add gradients up before anything else is done to them",
        has_signature("keras.optimizers:Optimizer.apply", "grads", "trainable_variables"),
    ),
    Name(
        "_trainable_variables",
        "step, torch.model_pickle",
        "as the variables that an optimizer was built for",
        lambda model: (
            list(map(id, model.optimizer._trainable_variables))
            == list(map(id, model.trainable_variables))
        ),
    ),
    Name(
        "_trainable_variables_indices",
        "parts, torch.model_pickle",
        "to bring an optimizer's index up to date when variables get other keys",
        knows_indices_by_key,
    ),
    Name(
        "_var_key",
        "tensorflow_engine, torch.model_pickle",
        "as the key under which an optimizer knows a variable",
        has_signature("keras.optimizers:Optimizer._var_key", "variable"),
    ),
    Name(
        "_exclude_from_weight_decay",
        "parts",
        "to keep variables excluded when they get other keys",
        excludes_by_key,
    ),
    Name(
        "_exclude_from_weight_decay_cache",
        "parts",
        "to forget answers that were given for other keys",
        excludes_by_key,
    ),
    Name(
        "_weight_decay_by_var_key",
        "parts",
        "to keep variables excluded when they get other keys",
        excludes_by_key,
    ),
    Name(
        "_var_to_optimizer_idx",
        "parts",
        "to keep variables with their optimizer when they get other keys",
        routes_by_key,
    ),
    Name(
        "keras.src.backend.common:masking",
        "parts, step",
        "for the masks that outputs carry",
        lambda model: (
            takes(lookup("keras.src.backend.common.masking:get_keras_mask"), "x")
            and takes(lookup("keras.src.backend.common.masking:set_keras_mask"), "x", "mask")
        ),
    ),
    Name(
        "seed_generator_state",
        "parts",
        "to find the state of random layers, to give each replica a stream of its own",
        lambda model: (
            [v.name for v in model.layers[1].non_trainable_variables] == ["seed_generator_state"]
        ),
    ),
    Name(
        "keras.src.trainers.data_adapters.array_data_adapter:can_convert_arrays",
        "parallel",
        "to see whether Keras will cut the data into batches of the size given",
        lambda model: (
            lookup("keras.src.trainers.data_adapters.array_data_adapter:can_convert_arrays")(
                {"x": X}
            )
            and not lookup(
                "keras.src.trainers.data_adapters.array_data_adapter:can_convert_arrays"
            )(iter([X]))
        ),
    ),
    Name("_value", "all engines", "to give a variable copies on other devices", swaps_value),
    Name(
        "train_function",
        "jax.trainer, tensorflow_engine",
        "to have steps traced again for other devices",
        lambda model: (
            {"train_function", "test_function", "predict_function"} <= set(vars(model))
            and takes(model.make_train_function, "force")
        ),
        ("jax", "tensorflow"),
    ),
    Name(
        "train_step",
        "all engines",
        "to run a step on every replica",
        is_read_from_instance("train_step"),
    ),
    Name(
        "predict_step",
        "jax.trainer, tensorflow_engine, torch.trainer",
        "to predict each replica's rows",
        is_read_from_instance("predict_step"),
    ),
    Name(
        "keras._tf_keras.keras.preprocessing.image:ImageDataGenerator",
        "compat.images",
        "to give old programs their image generators without TensorFlow",
        lambda model: takes(
            lookup("keras._tf_keras.keras.preprocessing.image:ImageDataGenerator.flow"),
            "x",
            "y",
            "batch_size",
        ),
    ),
    # -- JAX -----------------------------------------------------------------------------------
    Name(
        "jax._src:distributed",
        "jax.internals",
        "to join a run whose service lives in a process of its own",
        keeps_its_run,
        JAX,
    ),
    Name(
        "jax._src.lib:_jax",
        "jax.internals",
        "as the parts that JAX joins a run by",
        joins_by_hand,
        JAX,
    ),
    Name(
        "jax._src.xla_bridge:register_backend_factory",
        "jax.internals",
        "to have the CPU's collectives listen on one address",
        registers_backends,
        JAX,
    ),
    Name("_inputs", "world_arrays", "to read a share of arrays", holds_what_it_was_given),
    Name("_num_samples", "world_arrays", "to read a share of arrays", holds_what_it_was_given),
    Name("_batch_size", "world_arrays", "to read a share of arrays", holds_what_it_was_given),
    Name("_shuffle", "world_arrays", "to read a share of arrays", holds_what_it_was_given),
    Name(
        "keras.src.trainers.data_adapters.data_adapter:DataAdapter",
        "world_arrays",
        "as the base of an adapter of ours",
        takes_adapters_as_data,
    ),
    Name(
        "keras.src.trainers:data_adapters",
        "adapters",
        "to stand before the function that chooses adapters",
        is_where_epochs_look_for_adapters,
    ),
    Name(
        "keras.src.trainers.data_adapters:array_slicing",
        "tensorflow_feed, world_arrays",
        "to take rows of any kind of array",
        slices_arrays,
    ),
    Name(
        "keras.src.trainers.data_adapters.array_slicing:TensorflowSparseWrapper",
        "tensorflow.feed",
        "to take rows of sparse arrays",
        slices_sparse_arrays,
        TF,
    ),
    Name(
        "keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter.get_tf_dataset",
        "tensorflow.feed",
        "to have arrays read by pipelines that no thread tunes",
        reads_arrays_by_their_adapter,
        TF,
    ),
    *(
        Name(name, "seeds", "to seed Keras and not to import TensorFlow", seeds_as_keras_does)
        for name in (
            "keras.src.backend.common.global_state:set_global_attribute",
            "keras.src.utils.rng_utils:GLOBAL_RANDOM_SEED",
        )
    ),
    Name(
        "_initial_epoch", "world_calls", "to begin where the chief does", begins_at_a_restored_epoch
    ),
    Name(
        "_save_model",
        "chief_files, saving",
        "to leave a backup to the chief, which replaces its files as a whole",
        saves_by_a_method,
    ),
    Name(
        "_training_metadata_path",
        "saving",
        "to let a backup write its note of the epoch beside the one before",
        writes_its_note,
    ),
    Name(
        "keras.src.saving:saving_lib",
        "saving",
        "to keep its temporary folders beside the file that it writes",
        makes_temporary_folders,
    ),
    Name(
        "keras.src.utils:file_utils",
        "saving",
        "to tell paths of this machine from others",
        lambda model: (
            lookup("keras.src.utils.file_utils:is_remote_path")("gs://a/b")
            and not lookup("keras.src.utils.file_utils:is_remote_path")("/a/b")
        ),
    ),
    Name(
        "keras.src.utils:io_utils",
        "saving",
        "to ask whether to overwrite a file, as Keras does",
        has_signature("keras.src.utils.io_utils:ask_to_proceed_with_overwrite", "filepath"),
    ),
    Name("_losses", "trial_state", "to put back what a step has added", collects_losses),
    Name("_get_regularization_losses", "replication", "to scale what it returns", collects_losses),
    Name(
        "keras.src.backend.common.global_state:get_global_attribute",
        "trial_state",
        "to put the state of Keras' own seeds back",
        keeps_the_global_seeds,
    ),
    Name("_rng", "trial_state", "to put it back", draws_seeds_of_ops_by_a_generator, TF),
    Name(
        "keras.src:backend",
        "trial_state",
        "to repeat what its functions draw while a step is tried",
        draws_by_functions_of_the_backend,
    ),
    Name(
        "tensorflow.python.framework.auto_control_deps_utils:get_read_write_resource_inputs",
        "tensorflow.custom_loop",
        "to find variables that a step writes to",
        tells_which_resources_are_written,
        TF,
    ),
    Name(
        "tensorflow.python.checkpoint:checkpoint",
        "tensorflow.files",
        "to let the chief alone write checkpoints",
        has_signature(
            "tensorflow.python.checkpoint.checkpoint:Checkpoint._write", "file_prefix", "options"
        ),
        TF,
    ),
    Name(
        "tensorflow.python.checkpoint:checkpoint_management",
        "tensorflow.files",
        "to let other processes only remember a checkpoint",
        lambda model: callable(lookup(f"{CHECKPOINTS}:update_checkpoint_state_internal")),
        TF,
    ),
    Name(
        "_delete_file_if_exists",
        "tensorflow.files",
        "to leave the files of a folder to the chief",
        lambda model: takes(lookup(f"{CHECKPOINTS}:_delete_file_if_exists"), "filespec"),
        TF,
    ),
    Name(
        "jax._src.array:ArrayImpl",
        "jax.internals",
        "to make an array of one device that JAX may move",
        makes_arrays_that_are_not_committed,
        JAX,
    ),
    Name(
        "_save_checkpoint",
        "jax.state",
        "to have Orbax save arrays of the whole mesh",
        lambda model: callable(keras.callbacks.OrbaxCheckpoint._save_checkpoint),
        JAX,
    ),
    Name(
        "tensorflow.python.eager.context:global_seed",
        "world_calls",
        "to shuffle as the chief does",
        knows_the_seed,
        TF,
    ),
    Name(
        "keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter",
        "jax.trainer",
        "to build a model by a first batch of arrays",
        slices_batches,
        JAX,
    ),
    Name(
        "keras.src.trainers.data_adapters.data_adapter_utils:unpack_x_y_sample_weight",
        "jax.trainer",
        "to take the inputs out of a batch",
        lambda model: (
            lookup("keras.src.trainers.data_adapters.data_adapter_utils:unpack_x_y_sample_weight")(
                (X, Y)
            )[0]
            is X
        ),
        JAX,
    ),
    Name(
        "_get_jax_state",
        "jax.trainer",
        "to leave the values in the variables while a step runs",
        lambda model: (
            takes(
                model._get_jax_state,
                "trainable_variables",
                "non_trainable_variables",
                "optimizer_variables",
                "metrics_variables",
                "purge_model_variables",
            )
            and is_read_from_instance("_get_jax_state")(model)
        ),
        JAX,
    ),
    Name(
        "make_train_function",
        "horovod",
        "to reduce gradients between two parts of a step",
        is_read_from_instance("make_train_function"),
        JAX,
    ),
    Name(
        "stateless_apply",
        "horovod",
        "to take the gradients out of a step, by the optimizer that it calls once",
        takes_gradients_out_of_step,
        JAX,
    ),
    Name(
        "_make_function",
        "jax.trainer, horovod",
        "to lay each step's data and state out over the devices",
        lambda model: (
            # Since Keras 3.16 it compiles the step, with `out_shardings`.
            set(inspect.signature(model._make_function).parameters) - {"out_shardings"}
            == {"step_function", "concatenate_outputs"}
            and is_read_from_instance("_make_function")(model)
        ),
        JAX,
    ),
    Name(
        "keras.src.trainers.data_adapters.data_adapter_utils:PartialBatchList",
        "keras_internals",
        "for the batches of several steps, where Keras (since 3.16) would stack them",
        lambda model: (
            "out_shardings" not in inspect.signature(model._make_function).parameters
            or partial_batches([1, 2]) == [1, 2]
        ),
        JAX,
    ),
    Name(
        "_jax_state_synced",
        "jax.state",
        "to say that the variables are never behind",
        lambda model: model._jax_state_synced is True and takes(model.jax_state_sync),
        JAX,
    ),
    Name(
        "jax._src:xla_bridge",
        "jax.internals",
        "to ask whether JAX has started, without starting it",
        asks_whether_started,
        JAX,
    ),
    Name(
        "tensorflow.python.ops.control_flow_util:GraphOrParentsInXlaContext",
        "tensorflow.cpu_layers",
        "to leave what XLA compiles to Keras' formula",
        tells_what_xla_compiles,
        TF,
    ),
    Name(
        "tensorflow.python:pywrap_tfe",
        "tensorflow.distributed",
        "to start TensorFlow's server with the GIL released",
        starts_its_server,
        ("tensorflow",),
    ),
    Name(
        "tensorflow.python.eager.context:context",
        "tensorflow_settings",
        "to ask whether TensorFlow has started, without starting it",
        has_signature("tensorflow.python.eager.context:context"),
        TF,
    ),
    Name(
        "_initialized",
        "tensorflow_settings",
        "to ask whether TensorFlow has started, without starting it",
        knows_whether_it_has_started,
        TF,
    ),
    Name(
        "_lazy_call",
        "torch_settings",
        "to limit a GPU's memory once CUDA starts, without starting it",
        waits_for_cuda,
        TORCH,
    ),
    Name(
        "jax_num_cpu_devices",
        "jax.devices",
        "to set the number of CPU devices, after a restart if need be",
        lambda model: (
            isinstance(lookup("jax:config").jax_num_cpu_devices, int)
            and callable(lookup("jax.extend.backend:clear_backends"))
        ),
        JAX,
    ),
    # -- TensorFlow ----------------------------------------------------------------------------
    Name(
        "_merge_call",
        "tensorflow.mirrored",
        "to keep a replica's attributes while the threads of others run",
        has_signature(
            "tensorflow.python.distribute.distribute_lib:ReplicaContextBase._merge_call",
            "merge_fn",
            "args",
            "kwargs",
        ),
        TF,
    ),
    Name(
        "keras.src.backend.common:global_state",
        "tensorflow.mirrored",
        "to start the thread of a replica with the caller's global state of Keras",
        lambda model: all(
            isinstance(lookup(f"keras.src.backend.common:global_state.{name}"), threading.local)
            for name in ("GLOBAL_STATE_TRACKER", "GLOBAL_SETTINGS_TRACKER")
        ),
        TF,
    ),
    *(
        Name(
            name,
            "seeds, tensorflow_seeds",
            "to seed what functions without a seed draw from, and to give steps another stream",
            draws_from_the_global_generator,
        )
        for name in (
            "keras.src.random.seed_generator:GLOBAL_SEED_GENERATOR",
            "keras.src.random.seed_generator:SeedGenerator",
            "keras.src.backend.common.global_state:get_global_attribute",
        )
    ),
    *(
        Name(
            f"keras.src.utils.tracking:{kind}",
            "tensorflow.mirrored",
            "to restore what attributes held, past the trackers",
            tracks_in_containers,
            TF,
        )
        for kind in ("TrackedDict", "TrackedList", "TrackedSet")
    ),
    Name(
        "_distribute_strategy",
        "tensorflow.mirrored",
        "to refuse a model that was made under a strategy of tf.distribute",
        lambda model: model._distribute_strategy is None,
        TF,
    ),
    *(
        Name(
            name,
            "tensorflow.mirrored",
            "to refuse an optimizer that was made under a strategy of tf.distribute",
            lambda model: (
                type(model.optimizer._distribution_strategy).__name__
                == "_DefaultDistributionStrategy"
            ),
            TF,
        )
        for name in ("_distribution_strategy", "_DefaultDistributionStrategy")
    ),
    Name(
        "_post_build",
        "tensorflow.trainer",
        "to end a build as Keras does",
        lambda model: callable(model._post_build),
        TF,
    ),
    Name(
        "keras.src.backend.tensorflow.optimizer:TFOptimizer",
        "tensorflow.variables",
        "to know which parts of an optimizer reduce by themselves",
        lambda model: isinstance(
            model.optimizer, lookup("keras.src.backend.tensorflow.optimizer:TFOptimizer")
        ),
        TF,
    ),
    Name(
        "keras.src.optimizers.base_optimizer:BaseOptimizer",
        "tensorflow.variables",
        "for the parts of an optimizer as they are without a strategy",
        lambda model: isinstance(
            model.optimizer, lookup("keras.src.optimizers.base_optimizer:BaseOptimizer")
        ),
        TF,
    ),
    *(
        Name(
            part,
            "tensorflow.variables",
            "to replace what would reduce a second time",
            differs_from_base(part),
            TF,
        )
        for part in (
            "_backend_update_step",
            "_apply_weight_decay",
            "_overwrite_model_variables_with_average_value",
            "_backend_increment_gradient_accumulators",
        )
    ),
    Name(
        "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer",
        "tensorflow.variables",
        "to reach the optimizer inside",
        lambda model: (
            lookup("keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer")
            is keras.optimizers.LossScaleOptimizer
        ),
        TF,
    ),
    *(
        Name(
            part,
            "tensorflow.variables",
            "to scale losses without leaving the replica",
            has_signature(
                f"keras.optimizers:LossScaleOptimizer.{part}", "grads", "trainable_variables"
            ),
            TF,
        )
        for part in ("_tf_apply", "_common_apply")
    ),
    Name(
        "_jit_compile",
        "tensorflow.trainer",
        "to switch XLA off, which cannot span devices",
        lambda model: model._jit_compile in (True, False),
        TF,
    ),
    Name(
        "_maybe_symbolic_build",
        "tensorflow.trainer",
        "to create all variables before a step is traced",
        lambda model: (
            takes(model._maybe_symbolic_build, "iterator", "data_batch")
            and is_read_from_instance("_maybe_symbolic_build")(model)
        ),
        TF,
    ),
    Name(
        "_distributed_dataset",
        "tensorflow.trainer",
        "to know what the data looks like without taking any of it",
        describes_the_data,
        TF,
    ),
    Name(
        "compute_output_spec",
        "tensorflow.trainer",
        "to build a model that predicts before it trains",
        lambda model: (
            lookup("keras.src.backend:compute_output_spec")(
                model, keras.KerasTensor((2, 4)), training=False
            ).shape
            == (2, 1)
        ),
        TF,
    ),
    Name(
        "_restore_from_tensors",
        "tensorflow.change_tracker",
        "to notice that a checkpoint was restored into a variable",
        restores_through_the_variable,
        TF,
    ),
    Name(
        "capture_call_time_value",
        "tensorflow.collectives",
        "to number the collectives of functions that other functions call",
        evaluates_at_each_call,
        TF,
    ),
    Name(
        "_collective_key_base",
        "tensorflow.mirrored",
        "to keep the collectives of two strategies apart",
        keys_collectives,
        TF,
    ),
    Name(
        "tensorflow.python.distribute.values:MirroredVariable",
        "tensorflow.variables",
        "to make a mirrored variable that reads as a number",
        lambda model: inspect.isclass(
            lookup("tensorflow.python.distribute.values:MirroredVariable")
        ),
        TF,
    ),
    *(
        Name(
            part,
            "tensorflow.variables",
            "to write all copies when a plain model trains the variable too",
            has_signature(
                f"tensorflow.python.distribute.values:MirroredVariable.{part}", "update_fn", "value"
            ),
            TF,
        )
        for part in ("_update", "_update_cross_replica")
    ),
    Name(
        "tensorflow.python.distribute.distribute_lib:get_update_replica_id",
        "tensorflow.variables",
        "to see whether a plain model's optimizer writes a mirrored variable",
        lambda model: (
            lookup("tensorflow.python.distribute.distribute_lib:get_update_replica_id")() is None
        ),
        TF,
    ),
    Name(
        "_default_value",
        "torch.model_pickle",
        "to rebuild the tables of lookup layers in another process",
        keeps_default_of_tables,
        TORCH,
    ),
    Name(
        "_autoconvert_optionals",
        "tensorflow.trainer",
        "to trace a user's own step with the data as Keras passes it",
        lambda model: model._autoconvert_optionals(lambda data: data)((X, None))[0] is X,
        TF,
    ),
    *(
        Name(
            f"tensorflow.python.framework.op_callbacks:{part}",
            "tensorflow.engine",
            "to print each op with its device after TensorFlow has started",
            calls_back_for_each_op,
            TF,
        )
        for part in ("add_op_callback", "remove_op_callback")
    ),
    # -- torch ---------------------------------------------------------------------------------
    Name(
        "_cdata",
        "torch.devices",
        "to know the memory that a variable shares with the tensor it is made from",
        shares_memory_with_its_tensor,
        TORCH,
    ),
    Name(
        "_symbolic_build",
        "tensorflow_engine, torch.trainer",
        "to know when all variables of a compiled model exist",
        lambda model: takes(model._symbolic_build, "iterator", "data_batch"),
        ("tensorflow", "torch"),
    ),
    *(
        Name(
            f"{module}:get_device",
            "keras_internals",
            "as the device that Keras puts tensors on",
            lambda model: torch_device().split(":")[0] in ("cpu", "cuda"),
            TORCH,
        )
        # The second since Keras 3.16.
        for module in ("keras.src.backend.torch.core", "keras.src.backend.torch.ops.core")
    ),
    Name(
        "_initialize_ddp",
        "torch.trainer",
        "to reduce gradients once, where Keras (since 3.16) would as well",
        lambda model: (
            not hasattr(type(model), "_initialize_ddp")
            or (model.ddp_model is None and is_read_from_instance("_initialize_ddp")(model))
        ),
        TORCH,
    ),
    Name(
        "keras.src.models.model:inject_functional_model_class",
        "torch.model_pickle",
        "to make a user's class a functional one in a worker, as a call with inputs does",
        becomes_functional,
        TORCH,
    ),
    Name(
        "keras.src.models.functional:Functional",
        "torch.model_pickle",
        "to recognize a user's functional model",
        becomes_functional,
        TORCH,
    ),
    Name(
        "keras.src.utils.backend_utils:DynamicBackend",
        "torch.model_pickle",
        "to carry a preprocessing layer, which holds one and cannot be copied by its attributes",
        names_its_backend,
        TORCH,
    ),
    Name(
        "_backend",
        "torch.model_pickle",
        "the backend that such an object stands for",
        names_its_backend,
        TORCH,
    ),
    Name(
        "keras.src.saving.keras_saveable:KerasSaveable",
        "torch.model_pickle",
        "to recognize what Keras would pickle through its file format",
        lambda model: all(
            isinstance(part, lookup("keras.src.saving.keras_saveable:KerasSaveable"))
            for part in (model, model.layers[-1], model.optimizer, model._loss_tracker)
        ),
        TORCH,
    ),
    Name(
        "keras.src.utils:tracking",
        "torch.model_pickle",
        "to carry lists, dicts and sets that report what is put into them",
        tracks_in_containers,
        TORCH,
    ),
    Name(
        "_eval_epoch_iterator",
        "torch.model_pickle",
        "to leave behind what leads to the data",
        keeps_validation_data,
        TORCH,
    ),
    Name(
        "_trainable",
        "torch.model_copy",
        "to see what a callback froze",
        lambda model: model.layers[-1].bias._trainable is True,
        TORCH,
    ),
    Name(
        "_version",
        "torch.model_copy",
        "to notice what was written between two steps",
        counts_writes,
        TORCH,
    ),
    *(
        Name(
            part,
            "torch.process_group",
            "to keep the replicas' sockets on this machine",
            makes_gloo_on_loopback,
            TORCH,
        )
        for part in ("_Options", "_devices", "_timeout")
    ),
    Name(
        "torch.distributed:Store",
        "torch.process_group",
        "to let process groups find each other through the run's rendezvous server",
        calls_a_store_of_python,
        TORCH,
    ),
]


@pytest.mark.parametrize(
    "entry", [entry for entry in TABLE if BACKEND in entry.backends], ids=lambda entry: entry.name
)
def test_name_is_as_the_engines_expect(entry, model):
    reason = "it is there, but does something else"
    try:
        is_as_expected = entry.check(model)
    except Exception as error:
        is_as_expected, reason = False, repr(error)
    assert is_as_expected, (
        f"engines ({entry.used_by}) use {entry.name} {entry.purpose}; "
        f"with Keras {keras.__version__} on {BACKEND}: {reason}"
    )


def test_the_table_is_complete():
    """Private names in the engines' sources are our own, or in the table."""
    package = Path(unisono.__file__).parent
    packages = ("backends", "replication", "data", "checkpoint", "horovod")
    sources = [path for name in packages for path in package.glob(f"{name}/**/*.py")]
    sources += [package / "parallel.py", package / "keras_internals.py"]
    trees = {
        f"{path.parent.name}.{path.stem}": ast.parse(path.read_text(encoding="utf-8"))
        for path in sources
    }
    own = {name for tree in trees.values() for name in own_names(tree)}
    own |= {"_unisono", "_unisono_horovod", "_unisono_ranks", "_exit"}
    known = {entry.name for entry in TABLE}
    unknown = {
        f"{name} in {stem}"
        for stem, tree in trees.items()
        for name in foreign_names(tree)
        if name not in own | known
    }
    assert not unknown, "add these to the table, each with what it is for and a check"


def own_names(tree: ast.AST) -> set[str]:
    """What a module defines, or keeps on its own objects."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif is_stored_on_self(node):
            names.add(node.attr)
    return names


def is_stored_on_self(node: ast.AST) -> bool:
    is_stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return is_stored and ast.unparse(node.value) == "self"


def foreign_names(tree: ast.AST) -> set[str]:
    """Private attributes, private names given as strings, and imports from private modules."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value if node.value.isidentifier() else "")
        elif isinstance(node, ast.ImportFrom) and is_private(node.module or ""):
            names.update(f"{node.module}:{alias.name}" for alias in node.names)
    return {name for name in names if ":" in name or re.match(r"_[^_]", name)}


def is_private(module: str) -> bool:
    return any(part in ("src", "_src", "python") for part in module.split("."))
