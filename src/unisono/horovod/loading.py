"""Load a model that goes on training in all processes."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from unisono.horovod.compression import Compression, Compressor
from unisono.horovod.models import attach
from unisono.horovod.optimizer import DistributedOptimizer


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a saved model and distribute its optimizer, with the state that it was saved with.

    Any file of Keras will do, whether its optimizer was a distributed one or not.

    >>> import keras, unisono.horovod as hvd
    >>> hvd.init()
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    >>> model.save("model.keras")
    >>> type(hvd.load_model("model.keras").optimizer).__name__
    'Adam'
    """
    if legacy_opts:
        raise ValueError("Received legacy_opts=True. Keras 3 has no legacy optimizers.")
    objects = {each.__name__: each for each in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects=objects | dict(custom_objects or {}))
    if model.optimizer is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
        attach(model)
    return model
