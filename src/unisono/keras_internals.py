"""Every private name of Keras that `fit`, `replication`, `data` and `checkpoint` use.

When Keras renames one of them, this is the file to edit: where releases differ, both names are
looked for instead of comparing versions. tests/backend/test_keras_names.py checks each name.
"""

import inspect
from collections.abc import Callable
from typing import Any

import keras
from keras.src import backend as keras_backend
from keras.src.backend.common.global_state import get_global_attribute, set_global_attribute
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.trainers.data_adapters.array_data_adapter import can_convert_arrays
from keras.src.utils import is_default
from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED

from unisono.hooks import original

__all__ = ["INITIAL_EPOCH", "can_convert_arrays", "is_default"]

INITIAL_EPOCH = "_initial_epoch"
"""The attribute of a model that `BackupAndRestore` sets to where training goes on."""


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


def jax_step(model: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """A step as it is given to `_make_function`, compiled if the model's steps are."""
    if not _makes_compiled(model) or model.run_eagerly or not model.jit_compile:
        return step
    import jax

    compiled: Callable[..., Any] = jax.jit(step, donate_argnums=0)
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
