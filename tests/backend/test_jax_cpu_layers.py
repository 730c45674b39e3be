"""Replaced CPU layers give what Keras' own computations give, and so do their gradients."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras import layers
from twins import BACKEND

import unisono

if BACKEND != "jax":
    pytest.skip("JAX's CPU layers", allow_module_level=True)

import jax

from unisono.backends.jax.cpu_layers import replace_layers
from unisono.backends.jax.framework import JaxFramework
from unisono.devices import cpu_layers


def replaced(layer):
    replace_layers(keras.Sequential([layer]), JaxFramework.cpu_layers)
    return layer


IMAGE_LAYERS = {
    "max": lambda: layers.MaxPooling2D(3, strides=2),
    "max of pairs": lambda: layers.MaxPooling2D((2, 1)),
    "max same": lambda: layers.MaxPooling2D(3, strides=2, padding="same"),
    "max with gaps": lambda: layers.MaxPooling2D(2, strides=3, padding="same"),
    "max of many": lambda: layers.MaxPooling2D(7, strides=1),
    "half max": lambda: layers.MaxPooling2D(2, dtype="bfloat16"),
    "average": lambda: layers.AveragePooling2D(3),
}


def found(layer, x):
    """Outputs, and the gradients of the inputs and of every weight."""
    weights = [variable.value for variable in layer.trainable_variables]

    def total(x, weights):
        y, _ = layer.stateless_call(weights, [], x)
        return wavy_sum(y), y

    gradients, y = jax.grad(total, (0, 1), has_aux=True)(x, weights)
    return [np.asarray(value, "float32") for value in jax.tree.leaves((y, gradients))]


def wavy_sum(y):
    return jax.numpy.sum(jax.numpy.sin(3.0 * y.astype("float32")))


@pytest.mark.parametrize("kind", IMAGE_LAYERS)
def test_images_as_keras_has_them(kind):
    # Of few different numbers, so that many windows have their maximum in several places.
    x = np.random.default_rng(0).integers(-1, 3, size=(3, 9, 8, 3)).astype("float32")

    def of(change):
        keras.utils.set_random_seed(1)
        layer = IMAGE_LAYERS[kind]()
        layer.build(x.shape)
        return found(change(layer), x)

    for mine, right in zip(of(replaced), of(lambda c: c), strict=True):
        np.testing.assert_allclose(mine, right, atol=1e-6 * np.abs(right).max(), rtol=0)


def test_changes_forwards_and_gradients_of_gradients():
    x = np.random.default_rng(0).normal(size=(2, 6, 6, 2)).astype("float32")
    change = np.ones_like(x)
    plain = layers.MaxPooling2D(3, strides=2)
    ours = replaced(layers.MaxPooling2D(3, strides=2))

    def curvature(layer):
        value = lambda x: wavy_sum(layer(x))  # noqa: E731
        along = lambda x: jax.jvp(value, (x,), (change,))[1]  # noqa: E731
        return along(x), jax.grad(along)(x)

    for mine, right in zip(curvature(ours), curvature(plain), strict=True):
        np.testing.assert_allclose(mine, right, atol=1e-5, rtol=1e-5)


def test_a_window_larger_than_the_image_is_left_to_keras():
    x = np.ones((1, 3, 3, 1), "float32")
    layer = replaced(layers.MaxPooling2D(4))
    assert layer(x).shape == layers.MaxPooling2D(4)(x).shape


def test_a_class_with_its_own_call_keeps_it():
    class Own(layers.MaxPooling2D):
        def call(self, inputs):
            return inputs + 1.0

    own = replaced(Own())
    assert np.all(np.asarray(own(np.ones((1, 2, 2, 1), "float32"))) == 2.0)


HOOKS = ["call", "_moments"]


@pytest.mark.parametrize(
    ("launcher", "switch", "expected"),
    [
        ("unisono", "", HOOKS),
        ("unisono", "0", HOOKS[1:]),
        ("none", "1", HOOKS[1:]),
    ],
)
def test_only_processes_of_unisono_run_replace_layers(monkeypatch, launcher, switch, expected):
    monkeypatch.setattr(cpu_layers, "topology", lambda: SimpleNamespace(launcher=launcher))
    monkeypatch.setenv(cpu_layers.SWITCH, switch)
    kinds = [layers.MaxPooling2D(2), layers.BatchNormalization()]
    net = keras.Sequential([keras.Input((4, 4, 2)), *kinds])
    unisono.parallel(net, replicas=2)
    net.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(6, 4, 4, 2)).astype("float32")
    net.fit(x, x[:, ::2, ::2], batch_size=6, verbose=0)

    def found():
        return [name for name, layer in zip(HOOKS, net.layers, strict=True) if name in vars(layer)]

    assert found() == expected
    unisono.release(net)
    assert found() == []
