"""Every private name of Keras that `fit`, `replication`, `data` and `checkpoint` use.

When Keras renames one of them, this is the file to edit: where releases differ, both names are
looked for instead of comparing versions. tests/backend/test_keras_names.py checks each name.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
from keras.src import backend as keras_backend
from keras.src.backend.common.global_state import get_global_attribute, set_global_attribute
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.legacy.saving import legacy_h5_format
from keras.src.losses import losses as loss_functions
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.saving import saving_lib
from keras.src.trainers import data_adapters
from keras.src.trainers.compile_utils import CompileMetrics
from keras.src.trainers.data_adapters.array_data_adapter import (
    ArrayDataAdapter,
    can_convert_arrays,
)
from keras.src.trainers.data_adapters.array_slicing import convert_to_sliceable
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.utils import is_default
from keras.src.utils.file_utils import is_remote_path
from keras.src.utils.io_utils import ask_to_proceed_with_overwrite
from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED

from unisono.hooks import original

__all__ = [
    "ArrayDataAdapter",
    "CompileMetrics",
    "DataAdapter",
    "LossFunctionWrapper",
    "ask_to_proceed_with_overwrite",
    "can_convert_arrays",
    "convert_to_sliceable",
    "data_adapters",
    "get_keras_mask",
    "is_default",
    "is_remote_path",
    "legacy_h5_format",
    "loss_functions",
    "saving_lib",
    "set_keras_mask",
]

# Methods that are replaced on an instance, and attributes that are read and written.
MOMENTS = "_moments"
"""Of a batch norm layer: computes mean and variance of its inputs."""
REGULARIZATION_LOSSES = "_get_regularization_losses"
ADDED_LOSSES = "_losses"
"""Of a layer: the list that `add_loss` appends to."""
INITIAL_EPOCH = "_initial_epoch"
"""Of a model: `BackupAndRestore` sets it to where training goes on."""
SAVE_BACKUP = "_save_model"
"""Of `BackupAndRestore`: writes the backup."""
BACKUP_EPOCH_PATH = "_training_metadata_path"
"""Of `BackupAndRestore`: the file with the epoch, which it writes itself."""


# -- models, layers, variables --------------------------------------------------------------------


def layers_of(model: Any, *, include_self: bool = True) -> Iterator[Any]:
    """All layers of a model, nested ones included."""
    found: Iterator[Any] = model._flatten_layers(include_self=include_self)
    return found


def value_of(variable: Any) -> Any:
    """The backend's array or variable that holds a value; None before there is one."""
    return variable._value


def set_value(variable: Any, value: Any) -> None:
    """Replace what `value_of` returns."""
    variable._value = value


def own_non_trainable_variables(layer: Any) -> list[Any]:
    """A layer's own, without those of its sublayers and of its seeds."""
    found: list[Any] = layer._non_trainable_variables
    return found


def reduction_axes(batch_norm: Any) -> list[int]:
    """The axes over which a batch norm layer takes its statistics."""
    axes: list[int] = batch_norm._reduction_axes
    return axes


# -- compiled losses and metrics ------------------------------------------------------------------


def compiled_loss(model: Any) -> Any:
    """The loss of `compile` over all outputs, or None."""
    return model._compile_loss


def compiled_metrics(model: Any) -> Any:
    """The metrics of `compile` as one metric, or None; another object after another `compile`."""
    return getattr(model, "_compile_metrics", None)


def loss_tracker(model: Any) -> Any:
    """The metric that averages the loss of an epoch."""
    return model._loss_tracker


def losses_by_output(loss: Any) -> list[Any]:
    """The losses that a compiled loss was made of, once it is built; None for no loss."""
    found = getattr(loss, "_flat_losses", None) or []
    return [None if one is None else one.loss for one in found]


def function_of(metric: Any) -> Any:
    """The function that a metric averages, or None."""
    return getattr(metric, "_fn", None)


def keywords_of(wrapper: Any) -> dict[str, Any]:
    """The keyword arguments of the function that a loss or metric wraps."""
    found: dict[str, Any] = getattr(wrapper, "_fn_kwargs", {})
    return found


# -- optimizers -----------------------------------------------------------------------------------


def optimized_variables(optimizer: Any) -> list[Any]:
    """The variables that an optimizer was built for."""
    found: list[Any] = optimizer._trainable_variables
    return found


def rename_variables(optimizer: Any, renamed: dict[Any, Any]) -> None:
    """Update the records in which an optimizer knows variables by keys."""
    # The last since Keras 3.16, in place of a cache that is filled as it trains.
    records = ("_trainable_variables_indices", "_var_to_optimizer_idx", "_weight_decay_by_var_key")
    for name in records:
        if name in vars(optimizer):
            record = getattr(optimizer, name)
            setattr(optimizer, name, {renamed.get(key, key): i for key, i in record.items()})
    if "_exclude_from_weight_decay" in vars(optimizer):
        excluded = optimizer._exclude_from_weight_decay
        optimizer._exclude_from_weight_decay = {renamed.get(key, key) for key in excluded}
        if "_exclude_from_weight_decay_cache" in vars(optimizer):
            optimizer._exclude_from_weight_decay_cache = {}


# -- arrays as data -------------------------------------------------------------------------------


class ArrayFields(NamedTuple):
    """What an adapter of arrays was made of."""

    inputs: Any
    num_samples: int
    batch_size: int
    shuffle: bool | str
    """"batch": the rows of each batch among themselves, in an order drawn when it is read."""


def fields_of(adapter: Any) -> ArrayFields:
    return ArrayFields(adapter._inputs, adapter._num_samples, adapter._batch_size, adapter._shuffle)


# -- random numbers -------------------------------------------------------------------------------


def set_global_seed(seed: int) -> None:
    """Seed what Keras functions without a seed draw from."""
    set_global_attribute(GLOBAL_RANDOM_SEED, seed)
    set_global_attribute(GLOBAL_SEED_GENERATOR, None)  # Keras makes it anew from the seed.


def global_seed_state() -> Any:
    """The variable of Keras' global seed generator, or None before it is first used."""
    generator = get_global_attribute(GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state


def random_module() -> Any:
    """The backend's module whose functions `keras.random` calls."""
    return keras_backend.random


# -- differences between releases -----------------------------------------------------------------


def torch_device() -> str:
    """The device that Keras puts torch's tensors on."""
    try:
        from keras.src.backend.torch.core import get_device
    except ModuleNotFoundError:  # Since 3.16.
        from keras.src.backend.torch.ops.core import get_device
    device: str = get_device()
    return device


# -- JAX: since 3.16 `_make_function` compiles the step, and data comes stacked for several -------


def jax_step(model: Any, step: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A step as it is given to `_make_function`, compiled if the model's steps are.

    `options` are more arguments of `jax.jit`.
    """
    if model.run_eagerly or not model.jit_compile:
        return step
    if _makes_compiled(model):
        function = step
    elif options and not keras.config.is_nnx_enabled():
        function = step.__wrapped__  # type: ignore[attr-defined]  # Of Keras' own jax.jit.
    else:
        return step
    import jax

    compiled: Callable[..., Any] = jax.jit(function, donate_argnums=0, **options)
    return compiled


def jax_function(model: Any, run: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Keras' `_make_function` for a `run(state, batch)` that is not to be compiled as a whole."""
    if not _makes_compiled(model):
        function: Callable[..., Any] = original(model, "_make_function")(run, **options)
        return function

    def several(state: Any, iterator: Any) -> Any:
        outputs = []
        for batch in _batches_of(next(iterator), model.steps_per_execution):
            output, state = run(state, batch)
            outputs.append(output)
        if len(outputs) == 1 or not options.get("concatenate_outputs"):
            return outputs[-1], state
        concatenate = keras.ops.concatenate
        return keras.tree.map_structure(lambda *parts: concatenate(parts), *outputs), state

    return several


def partial_batches(batches: list[Any]) -> list[Any]:
    """Batches of several steps, which Keras must not stack, as its JAX trainer takes them."""
    from keras.src.trainers.data_adapters.data_adapter_utils import PartialBatchList

    found: list[Any] = PartialBatchList(batches)
    return found


def _makes_compiled(model: Any) -> bool:
    return "out_shardings" in inspect.signature(original(model, "_make_function")).parameters


def _batches_of(found: Any, num_steps: int) -> list[Any]:
    if num_steps == 1:
        return [found]
    if type(found) is type(partial_batches([])):
        return list(found)
    stacked = len(keras.tree.flatten(found)[0])
    return [keras.tree.map_structure(lambda leaf, i=i: leaf[i], found) for i in range(stacked)]


# -- torch: since 3.16 functions keep the steps that they were made of, and Keras reduces too -----


def forget_torch_functions(model: Any) -> None:
    """Have Keras make its functions anew, from the steps that a model has now."""
    model.train_function = model.test_function = model.predict_function = None
    if getattr(model, "ddp_model", None) is not None:
        object.__setattr__(model, "ddp_model", None)  # As Keras sets it, past torch's registry.


def own_metrics_result(model: Any) -> Any:
    """A model's `get_metrics_result` of what this process has.

    Since 3.16 Keras on torch sums metrics over the processes of `torch.distributed`, if a program
    has initialized it; replicas have done so already. The trainers' common base class does not.
    """
    plain = type(model).get_metrics_result
    if plain is keras.Model.get_metrics_result:
        base = keras.src.trainers.trainer
        plain = (getattr(base, "BaseTrainer", None) or base.Trainer).get_metrics_result
    return plain(model)
