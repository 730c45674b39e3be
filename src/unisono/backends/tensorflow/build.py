"""Create all variables of a model before its steps are traced, from what its data looks like."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from unisono.backends.tensorflow.rows import Composite
from unisono.hooks import original
from unisono.replication.introspection import optimizers_of


def spec_of(iterator: Any) -> Any:
    """What the data of an epoch iterator looks like.

    Not a batch of it: taking one changes the order in which a PyDataset with workers yields the
    others.
    """
    return iterator._distributed_dataset.element_spec


def build(model: Any, prepare: Callable[[], None], data_batch: Any) -> None:
    """Build a model for a batch, or for the specification of one.

    `prepare` is called when variables may have been made, and readies them for replicas.
    """
    # A data set says so where there is nothing.
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
        prepare()
        return
    try:
        model._symbolic_build(data_batch=data_batch)
    except RuntimeError:
        if not has_own_step:
            raise
        # A model with steps of its own needs no `call`, which Keras would build it by.
    prepare()
    if has_own_step and not all(o.built for o in optimizers_of(model)):
        _trace_alone(model, "train_step", data_batch)
        prepare()


def build_for_prediction(model: Any, prepare: Callable[[], None], data: Any) -> None:
    """Build a model that predicts before it is trained."""
    if _has_composites(data):
        _trace_alone(model, "predict_step", data)
        prepare()
        return
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    spec = keras.tree.map_structure(
        lambda t: keras.KerasTensor(t.shape, keras.backend.standardize_dtype(t.dtype)), x
    )
    keras.src.backend.compute_output_spec(model, spec, training=False)
    prepare()


def _has_composites(data_batch: Any) -> bool:
    """Whether data is ragged or sparse, of which Keras' symbolic build knows nothing."""
    kinds = (*Composite, tf.RaggedTensorSpec, tf.SparseTensorSpec)
    return any(isinstance(leaf, kinds) for leaf in keras.tree.flatten(data_batch))


def _is_built(model: Any) -> bool:
    parts = [*model._flatten_layers(), model._compile_metrics, model._compile_loss]
    return all(part.built for part in [*parts, *optimizers_of(model)] if part is not None)


def _trace_alone(model: Any, name: str, data_batch: Any) -> None:
    """Trace a step as on one device: so it makes the variables that it needs."""
    step = model._autoconvert_optionals(original(model, name))
    tf.function(step, autograph=False).get_concrete_function(data_batch)
