"""Every name that unisono uses and that Keras or a framework does not promise to keep.

Each line of a table is checked in the same way: the name exists and takes the parameters that we
give it. `REPLACED` are functions of which we put our own in place: Keras must call them there.
What the names do is covered by the exactness contract, which trains through all of them.
"""

# ruff: noqa: E501 (a name and what it is for stand on one line)

import ast
import importlib
import inspect
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

import unisono

BACKEND = keras.backend.backend()
X, Y = np.ones((6, 4), "float32"), np.ones((6, 1), "float32")

# A line: `object.attribute`, `module:attribute` or either with the first parameters of a call, then
# what it is used for. `a | b`: one of them exists, as releases of Keras differ. `?`: in some releases.
KERAS = """
model._flatten_layers(include_self)               layers, nested ones included
model._compile_loss                               the compiled loss
model._compile_metrics                            the compiled metrics
model._loss_tracker                               the mean loss of an epoch
model._initial_epoch                              begin where the chief does
model._symbolic_build(iterator, data_batch)       build before the first step
model.compile_from_config(config)                 models loaded with a distributed optimizer
model.get_metrics_result()                        metrics of all rows
keras.src.trainers.trainer:Trainer | keras.src.trainers.trainer:BaseTrainer  metrics of this process
dense._non_trainable_variables                    state of a layer itself
dense._losses                                     losses added by `add_loss`
dense._get_regularization_losses()                terms of the objective
norm._reduction_axes                              axes of the moments
norm._moments(inputs, mask)                       moments of the global batch
norm.call(inputs, training, mask)                 groups of rows
keras.layers:Conv2D.convolution_op(inputs, kernel)  convolutions as Keras wrote them
pool.pool_mode                                    pooling by the largest
loss._flat_losses                                 losses by output
squared._fn_kwargs                                losses that are means of samples
metric._fn                                        metrics that are sums of samples
keras.src.losses.losses:LossFunctionWrapper(fn, reduction, name)  losses that are means of samples
keras.src.losses:losses                           losses that are means of samples
keras.src.trainers.compile_utils:CompileMetrics   metrics inside of compiled ones
variable._value                                   the array that holds a value
variable.name                                     `seed_generator_state`
optimizer.apply(grads, trainable_variables)       reduce gradients
optimizer._trainable_variables                    variables of an optimizer
optimizer._trainable_variables_indices            variables by key
optimizer._var_key(variable)                      the key of a variable
optimizer._exclude_from_weight_decay | optimizer._weight_decay_by_var_key  variables by key
?optimizer._exclude_from_weight_decay_cache       until 3.15
several._var_to_optimizer_idx                     variables by key
velocity._momentum                                names of velocities
keras.src.backend.common.masking:get_keras_mask(x)            masks of outputs
keras.src.backend.common.masking:set_keras_mask(x, mask)      masks of outputs
keras.src.backend.common.global_state:get_global_attribute(name)         seeds
keras.src.backend.common.global_state:set_global_attribute(name, value)  seeds
keras.src.random.seed_generator:GLOBAL_SEED_GENERATOR         seeds
keras.src.random.seed_generator:SeedGenerator(seed)           seeds
keras.src.utils.rng_utils:GLOBAL_RANDOM_SEED                  seeds
keras.src:backend                                             functions that draw
keras.src.trainers:data_adapters                              arrays read by rows
keras.src.trainers.data_adapters.array_data_adapter:can_convert_arrays(arrays)  the global batch
keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter(x, y)      order of rows
keras.src.trainers.data_adapters.data_adapter:DataAdapter()                     an adapter of ours
keras.src.trainers.data_adapters:array_slicing                                  rows of any array
keras.src.trainers.data_adapters.array_slicing:convert_to_sliceable(arrays)     rows of any array
adapter._inputs                                   arrays
adapter._num_samples                              arrays
adapter._batch_size                               arrays
adapter._shuffle                                  arrays
backup._save_model()                              backups of the chief
backup._training_metadata_path                    the epoch of a backup
keras.src.utils:is_default(method)                callbacks that act at batches
keras.src.saving:saving_lib                       temporary folders
keras.src.saving:saving_lib.save_model(model, filepath)              saves by functions of Keras
keras.src.saving:saving_lib.save_weights_only(model, filepath)       saves by functions of Keras
keras.src.legacy.saving:legacy_h5_format                             saves by functions of Keras
keras.src.legacy.saving:legacy_h5_format.save_model_to_hdf5(model, filepath)  saves by functions
keras.src.utils.file_utils:is_remote_path(filepath)                  paths of this machine
keras.src.utils.io_utils:ask_to_proceed_with_overwrite(filepath)     as Keras asks
keras._tf_keras.keras.preprocessing.image:ImageDataGenerator.flow(x, y, batch_size)  old programs
"""
JAX = """
jax._src:distributed                              join a run
jax._src.lib:_jax                                 join a run by its parts
jax._src.lib:_jax.get_distributed_runtime_client  join a run by its parts
jax._src.lib:_jax.get_distributed_runtime_service  join a run by its parts
jax._src.lib:_jax.make_gloo_tcp_collectives       collectives on one address
jax._src.xla_bridge:register_backend_factory(name, factory)  collectives on one address
jax._src.xla_bridge:make_cpu_client(collectives)  collectives on one address
jax._src:xla_bridge.backends_are_initialized()    whether JAX has started
jax._src.array:ArrayImpl  arrays that may be moved
jax:config.jax_num_cpu_devices                    number of CPU devices
jax.extend.backend:clear_backends()               number of CPU devices
keras.callbacks:OrbaxCheckpoint._save_checkpoint(step)  collective checkpoints
keras.src.trainers.data_adapters.data_adapter_utils:unpack_x_y_sample_weight(data)  build a model
keras.src.trainers.data_adapters.data_adapter_utils:PartialBatchList | model.jax_state_sync()  steps
model._get_jax_state(trainable_variables)         state of a step
model._jax_state_synced                           variables are never behind
model._make_function(step_function)               place data and state
model.make_train_function(force)                  steps traced again
optimizer.stateless_apply(optimizer_variables, grads, trainable_variables)  gradients of a step
"""
TENSORFLOW = """
context._initialized                              whether TensorFlow has started
context._rng                                      seeds of eager ops
context._seed                                     seeds of eager ops
context._handle                                   start the server
tensorflow.python.eager.context:context()         settings and seeds
tensorflow.python:pywrap_tfe.TFE_EnableCollectiveOps  start the server
tensorflow.python.framework.auto_control_deps_utils:get_read_write_resource_inputs(op)  steps
tensorflow.python.checkpoint:checkpoint           files of the chief
tensorflow.python.checkpoint:checkpoint_management._delete_file_if_exists(filespec)  files
tensorflow.python.ops.resource_variable_ops:BaseResourceVariable.handle  variables that replicas share
tensorflow.python.distribute.distribute_lib:ReplicaContextBase._merge_call(merge_fn, args, kwargs)  threads
tensorflow.python.distribute.distribute_lib:get_update_replica_id()  writes of plain models
tensorflow.python.distribute.values:MirroredVariable._update(update_fn, value)  writes
tensorflow.python.distribute.values:MirroredVariable._update_cross_replica(update_fn, value)  writes
tensorflow.python.framework.func_graph:FuncGraph.capture_call_time_value(closure, spec)  keys
tensorflow.python.framework.op_callbacks:add_op_callback(callback_fn)     placement
tensorflow.python.framework.op_callbacks:remove_op_callback(op_callback)  placement
tensorflow:distribute.MirroredStrategy._collective_key_base  collectives of two strategies
tensorflow:Variable._restore_from_tensors(restored_tensors)  restored checkpoints
keras.src.backend.common:global_state             threads of replicas
keras.src.backend.common.global_state:GLOBAL_STATE_TRACKER      threads of replicas
?keras.src.backend.common.global_state:GLOBAL_SETTINGS_TRACKER  until 3.15
keras.src.utils.tracking:TrackedDict(values)      attributes of replicas
keras.src.utils.tracking:TrackedList(values)      attributes of replicas
keras.src.utils.tracking:TrackedSet(values)       attributes of replicas
keras.src.backend.tensorflow.optimizer:TFOptimizer._backend_update_step(grads, trainable_variables)  reduce once
keras.src.backend.tensorflow.optimizer:TFOptimizer._apply_weight_decay(variables)  reduce once
keras.src.backend.tensorflow.optimizer:TFOptimizer._overwrite_model_variables_with_average_value(trainable_variables)  reduce once
keras.src.optimizers.base_optimizer:BaseOptimizer._backend_increment_gradient_accumulators(grads)  reduce once
keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer._tf_apply(grads, trainable_variables)  loss scales
keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer._common_apply(grads, trainable_variables)  loss scales
keras.src.trainers.data_adapters.array_slicing:TensorflowSparseWrapper  rows of sparse arrays
keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter.get_tf_dataset()  pipelines
keras.src.backend:compute_output_spec(fn)         build a model
epoch._distributed_dataset                        what the data looks like
model._distribute_strategy                        models of tf.distribute
optimizer._distribution_strategy._DefaultDistributionStrategy | optimizer._distribution_strategy  optimizers of tf.distribute
model._post_build()                               end a build
model._jit_compile                                XLA cannot span devices
model._maybe_symbolic_build(iterator, data_batch)  create variables before a step is traced
model._autoconvert_optionals(step_func)           data as Keras passes it
"""
TORCH = """
torch:cuda._lazy_call                             limit memory once CUDA starts
torch:UntypedStorage._cdata                       memory that variables share
torch:Tensor._version                             writes between two steps
torch.distributed:ProcessGroupGloo._Options._devices  sockets on this machine
torch.distributed:ProcessGroupGloo._Options._timeout  sockets on this machine
torch.distributed:Store                           process groups by the rendezvous server
torch.distributed:ProcessGroupGloo._allgather_base  collectives
torch:_foreach_copy_                              gradients in buckets
torch:_foreach_mul                                gradients by the replica's share of the rows
torch:_foreach_zero_                              gradients in buckets
keras.src.backend.torch.core:get_device() | keras.src.backend.torch.ops.core:get_device()  device
keras.src.models.model:inject_functional_model_class(cls)  models in workers
keras.src.models.functional:Functional            models in workers
keras.src.utils.backend_utils:DynamicBackend(backend)  layers in workers
dynamic._backend                                  layers in workers
keras.src.saving.keras_saveable:KerasSaveable     what Keras pickles by files
keras.src.utils:tracking.TrackedList              containers in workers
lookup._default_value                             tables in workers
model._eval_epoch_iterator                        data stays behind
variable._trainable                               what a callback froze
?model._initialize_ddp()                          since 3.16, which reduces as well
"""
TABLES = {"jax": KERAS + JAX, "tensorflow": KERAS + TENSORFLOW, "torch": KERAS + TORCH}


@pytest.fixture(scope="module")
def samples():
    """Objects to find attributes on: a model with a bit of everything, trained, and its parts."""
    block = keras.Sequential([keras.layers.Dense(3), keras.layers.BatchNormalization()])
    layers = [keras.Input((4,)), block, keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_list=[block.layers[0].kernel])
    model.compile(optimizer, "mse", metrics=["mae"])
    model.fit(X, Y, validation_data=(X, Y), verbose=0)
    model._initial_epoch = None  # As `BackupAndRestore` leaves it.
    several = keras.optimizers.MultiOptimizer(lambda variable: optimizer)
    several.build(model.trainable_variables)
    momentum = keras.optimizers.SGD(momentum=0.5)
    momentum.build(model.trainable_variables)
    found = SimpleNamespace(
        model=model,
        dense=model.layers[-1],
        norm=block.layers[1],
        pool=keras.layers.MaxPooling2D(2),
        loss=model._compile_loss,
        squared=keras.losses.MeanSquaredError(),
        metric=model._compile_metrics.metrics[0],
        variable=model.layers[-1].bias,
        optimizer=optimizer,
        several=several,
        velocity=SimpleNamespace(
            **{name[name.rindex("_") :]: name for name in [v.name for v in momentum.variables[2:]]}
        ),
        adapter=find("keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter")(X, Y),
        backup=keras.callbacks.BackupAndRestore("folder"),
    )
    if BACKEND == "tensorflow":
        import tensorflow as tf

        tf.random.set_seed(7)
        found.context = find("tensorflow.python.eager.context:context")()
        epoch = find("keras.src.backend.tensorflow.trainer:TFEpochIterator")
        found.epoch = epoch(distribute_strategy=tf.distribute.get_strategy(), x=X, batch_size=2)
    if BACKEND == "torch":
        found.dynamic = find("keras.src.utils.backend_utils:DynamicBackend")("torch")
        found.lookup = keras.layers.IntegerLookup(vocabulary=[3, 5]).lookup_table
        model._eval_epoch_iterator = None  # Kept while `fit` validates.
    return found


def find(path: str, samples: Any = None) -> Any:
    """`module:attribute.attribute`, or the attribute of a sample."""
    module, colon, attributes = path.rpartition(":")
    found = importlib.import_module(module) if colon else samples
    for attribute in attributes.split("."):
        found = getattr(found, attribute)
    return found


def exists(spec: str, samples: Any) -> bool:
    """Whether a name exists, and takes parameters that begin with these."""
    path, parenthesis, rest = spec.partition("(")
    try:
        found = find(path, samples)
    except (AttributeError, ModuleNotFoundError):
        return False
    if not parenthesis:
        return True
    expected = [name for name in rest.rstrip(")").split(", ") if name]
    names = [name for name in inspect.signature(found).parameters if name != "self"]
    return callable(found) and names[: len(expected)] == expected


def lines_of(table: str) -> list[tuple[str, str]]:
    """Specifications with what they are for."""
    lines = filter(None, table.splitlines())
    return [tuple(re.split(r" {2,}", line, maxsplit=1)) for line in lines]


@pytest.mark.parametrize(("spec", "purpose"), lines_of(TABLES[BACKEND]))
def test_name_exists_as_it_is_used(spec, purpose, samples):
    if spec.startswith("?"):
        return
    assert any(exists(each, samples) for each in spec.split(" | ")), (
        f"Keras {keras.__version__} on {BACKEND} has no {spec}, which unisono uses for: {purpose}"
    )


def train(samples: Any) -> None:
    model = samples.model
    model.train_function = model.test_function = model.predict_function = None
    model.fit(X, Y, verbose=0)
    model.predict(X, verbose=0)


def save(samples: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        keras.saving.save_model(samples.model, f"{folder}/model.keras")
        keras.saving.save_model(samples.model, f"{folder}/model.h5")
        keras.saving.save_weights(samples.model, f"{folder}/model.weights.h5")


REPLACED = {
    "model.train_step": train,
    "norm._moments": lambda samples: samples.norm(np.ones((2, 3), "float32"), training=True),
    "dense._get_regularization_losses": lambda samples: samples.dense.losses,
    "keras.src.trainers:data_adapters.get_data_adapter": train,
    "keras.src.saving:saving_lib.get_temp_dir": save,
    "keras.src.saving:saving_lib.save_model": save,
    "keras.src.saving:saving_lib.save_weights_only": save,
    "keras.src.legacy.saving:legacy_h5_format.save_model_to_hdf5": save,
    "keras.src.backend:random.normal": lambda samples: keras.random.normal((2,), seed=1),
}
REPLACED_BY_BACKEND = {
    "jax": ["model._make_function", "model.make_train_function"],
    "tensorflow": ["model.predict_step", "model._maybe_symbolic_build"],
    "torch": ["model.predict_step"],
}


@pytest.mark.parametrize("path", [*REPLACED, *REPLACED_BY_BACKEND[BACKEND]])
def test_keras_calls_what_is_put_in_place(path, samples, monkeypatch):
    module, colon, attributes = path.rpartition(":")
    owner, _, name = attributes.rpartition(".")
    target, calls = find(f"{module}{colon}{owner}", samples), []
    plain = getattr(target, name)
    ours = lambda *args, **kwargs: calls.append(1) or plain(*args, **kwargs)  # noqa: E731
    # Past the trackers of attributes.
    monkeypatch.setitem(vars(target), name, ours)
    REPLACED.get(path, train)(samples)
    model = samples.model
    model.train_function = model.test_function = model.predict_function = None
    assert calls


def test_the_tables_are_complete():
    """Private names in the sources are our own, or in a table."""
    package = Path(unisono.__file__).parent
    packages = ("backends", "replication", "data", "checkpoint", "horovod")
    sources = [path for name in packages for path in package.glob(f"{name}/**/*.py")]
    sources += [package / f"{name}.py" for name in ("parallel", "keras_internals", "fit")]
    trees = {
        f"{path.parent.name}.{path.stem}": ast.parse(path.read_text(encoding="utf-8"))
        for path in sources
    }
    own = {name for tree in trees.values() for name in own_names(tree)}
    own |= {
        "_unisono",
        "_unisono_copies",
        "_unisono_horovod",
        "_unisono_ranks",
        "_unisono_save_by_function",
        "_exit",
    }
    specs = re.sub(
        r"\(.*?\)", "", " ".join(spec for spec, _ in lines_of(KERAS + JAX + TENSORFLOW + TORCH))
    )
    known = {part for spec in re.split(r"[ |?]+", specs) for part in parts_of(spec)}
    unknown = {
        f"{name} in {stem}"
        for stem, tree in trees.items()
        for name in foreign_names(tree)
        if name not in own | known
    }
    assert not unknown, "add these to a table, each with what it is for"


def test_private_names_of_keras_are_in_one_module():
    """`fit`, `replication`, `data` and `checkpoint` use them through keras_internals."""
    package = Path(unisono.__file__).parent
    packages = ("replication", "data", "checkpoint")
    sources = [path for name in packages for path in package.glob(f"{name}/*.py")]
    for path in [*sources, package / "fit.py", package / "parallel.py", package / "strategy.py"]:
        assert "keras.src" not in path.read_text(encoding="utf-8"), path


def parts_of(spec: str) -> set[str]:
    """What a specification names: an import, and the attributes of it."""
    module, colon, attributes = spec.rpartition(":")
    parts = attributes.split(".")
    return {f"{module}:{parts[0]}", *parts} if colon else set(parts)


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
