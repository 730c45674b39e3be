"""Properties over any number of rows, any global batch and any number of replicas.

Examples are few and fixed: on JAX and TensorFlow each new shape is compiled.
"""

import functools
from typing import Any

import keras
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

import unisono
from exactness.case import FLOAT32, state_of
from exactness.results import largest_deviation

FEATURES = 3
few = functools.partial(settings, derandomize=True, deadline=None, database=None)


def rows(count: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(count)
    x = draw.normal(size=(count, FEATURES)) * np.linspace(0.5, 1.5, count)[:, None]
    return x.astype("float32"), np.tanh(x[:, :1]).astype("float32")


@functools.cache
def model_on(replicas: int | None) -> Any:
    """A small net with batch norm, of rows and of images; None is plain Keras."""
    keras.utils.set_random_seed(5)
    # Two rows that nearly agree are pulled apart by up to 1/sqrt(epsilon), rounding included.
    norms = [layers.BatchNormalization(momentum=0.8, epsilon=0.1) for _ in range(2)]
    hidden = layers.Dense(4, use_bias=False)
    images = [layers.Reshape((2, 1, 2)), norms[1], layers.Flatten()]
    parts = [hidden, norms[0], layers.Activation("tanh"), *images, layers.Dense(1)]
    model = keras.Sequential([keras.Input((FEATURES,)), *parts])
    return model if replicas is None else unisono.parallel(model, replicas=replicas)


@functools.cache
def initial_weights() -> Any:
    return model_on(None).get_weights()


def trained(replicas: int | None, count: int, global_batch: int) -> Any:
    model = model_on(replicas)
    model.set_weights(initial_weights())
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    x, y = rows(count)
    options = {"batch_size": global_batch, "verbose": 0}
    history = model.fit(x, y, epochs=2, shuffle=False, **options).history
    return {
        "history": history,
        "evaluate": model.evaluate(x, y, return_dict=True, **options),
        "predict": model.predict(x, **options),
        **state_of(model),
    }


@few(max_examples=6)
@given(
    count=st.integers(1, 25), global_batch=st.integers(1, 13), replicas=st.sampled_from([2, 3, 4])
)
def test_training_agrees_with_one_device(count, global_batch, replicas):
    initial_weights()
    expected = trained(None, count, global_batch)
    found = largest_deviation(expected, trained(replicas, count, global_batch))
    assert found.value <= FLOAT32, f"{found.value:.1e} at {found.where}"


@few(max_examples=20)
@given(
    count=st.integers(1, 25), global_batch=st.integers(1, 9), replicas=st.sampled_from([2, 3, 4])
)
def test_predict_returns_every_row_once_in_order(count, global_batch, replicas):
    x = np.arange(count, dtype="float32")[:, None]
    answer = numbered(replicas).predict(x, batch_size=global_batch, verbose=0)
    assert answer.tolist() == (2 * x).tolist()


@functools.cache
def numbered(replicas: int) -> Any:
    """Doubles the number of a row."""
    doubling = layers.Dense(1, use_bias=False, kernel_initializer=keras.initializers.Constant(2.0))
    return unisono.parallel(keras.Sequential([keras.Input((1,)), doubling]), replicas=replicas)
