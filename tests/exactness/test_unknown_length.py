"""Data of which Keras does not know the number of batches: the end of it is no step.

Plain Keras on TensorFlow is no reference here: without XLA it counts a step more at the end of
each epoch. Arrays with the same rows in the same order are.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import unisono
from exactness.case import state_of
from exactness.results import largest_deviation

ROWS, GLOBAL_BATCH, EPOCHS = 47, 12, 3
TOLERANCE = 1e-5


def arrays() -> tuple[Any, Any]:
    x = np.random.default_rng(1).normal(size=(ROWS, 4)).astype("float32")
    return x, np.tanh(x[:, :2])


def tf_data() -> Any:
    import tensorflow as tf

    batches = tf.data.Dataset.from_tensor_slices(arrays()).batch(GLOBAL_BATCH)
    return batches.filter(lambda x, y: True)


def grain_map() -> Any:
    import grain

    samples = list(zip(*arrays(), strict=True))
    return grain.MapDataset.source(samples).batch(GLOBAL_BATCH, drop_remainder=False)


SOURCES: dict[str, Callable[[], Any]] = {"tf_data": tf_data, "grain_map": grain_map}


def make() -> Any:
    keras.utils.set_random_seed(3)
    hidden = keras.layers.Dense(5, activation="tanh")
    model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def trained(model: Any, *data: Any, **options: Any) -> dict[str, Any]:
    history = model.fit(*data, epochs=EPOCHS, shuffle=False, verbose=0, **options).history
    return {
        "history": history,
        "evaluate": model.evaluate(*data, verbose=0, return_dict=True, **options),
        **state_of(model),
    }


@functools.cache
def expected() -> dict[str, Any]:
    return trained(make(), *arrays(), batch_size=GLOBAL_BATCH)


@pytest.mark.parametrize(("name", "replicas"), [("tf_data", 1), ("grain_map", 2)])
def test_the_end_of_data_is_no_step(name, replicas):
    found = trained(unisono.parallel(make(), replicas=replicas), SOURCES[name]())
    assert largest_deviation(expected(), found).value <= TOLERANCE
