"""Convolutions of images on TensorFlow's CPU kernels: what Keras' own ways give, with gradients."""

import keras
import numpy as np
import pytest
from keras import layers
from twins import BACKEND

import unisono

if BACKEND != "tensorflow":
    pytest.skip("TensorFlow's kernels", allow_module_level=True)

import tensorflow as tf

from unisono.backends.tensorflow.cpu_layers import leave_kernels, use_kernels


def with_kernels(layer):
    """The layer, which computes by them from now on, and a model that holds it."""
    model = keras.Sequential([layer])
    use_kernels(model, lambda: None, is_alone=True)
    return layer, model


CONVOLUTIONS = {
    "plain": lambda: layers.Conv2D(5, 3, activation="relu"),
    "same": lambda: layers.Conv2D(5, 3, padding="same", use_bias=False),
    "strides": lambda: layers.Conv2D(5, 2, strides=2),
    "dilated": lambda: layers.Conv2D(5, 2, dilation_rate=2),
    "groups": lambda: layers.Conv2D(6, 3, groups=3),
    "one filter": lambda: layers.Conv2D(1, 3),
    "pixels": lambda: layers.Conv2D(5, 1, activation="relu"),
    "pixels without bias": lambda: layers.Conv2D(5, 1, padding="same", use_bias=False),
    "pixels of strides": lambda: layers.Conv2D(5, 1, strides=2),
    "pixels of groups": lambda: layers.Conv2D(6, 1, groups=3),
    "half": lambda: layers.Conv2D(5, 1, dtype="mixed_bfloat16"),
    "double": lambda: layers.Conv2D(5, 1, dtype="float64"),
}


def found(layer, x, shape):
    """Outputs, and the gradients of the inputs and of every weight."""

    @tf.function(input_signature=[tf.TensorSpec(shape, x.dtype)])
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
            total = tf.reduce_sum(tf.sin(3.0 * tf.cast(y, tf.float32)))
        weights = [variable.value for variable in layer.trainable_variables]
        return [y, *tape.gradient(total, [x, *weights])]

    return [np.asarray(tf.cast(value, tf.float32)) for value in step(x)]


@pytest.mark.parametrize("shape", [(3, 9, 8, 3), (None, 9, 8, 3), (None, None, None, 3)])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_images_as_keras_has_them(kind, shape):
    x = np.random.default_rng(0).normal(size=(3, 9, 8, 3)).astype("float32")

    def of(change):
        keras.utils.set_random_seed(1)
        layer = CONVOLUTIONS[kind]()
        layer.build(x.shape)
        return found(change(layer), x, shape)

    for mine, right in zip(of(lambda c: with_kernels(c)[0]), of(lambda c: c), strict=True):
        np.testing.assert_allclose(mine, right, atol=2e-6 * np.abs(right).max(), rtol=0)


def test_shapes_stay_known():
    layer, _ = with_kernels(layers.Conv2D(5, 1))
    layer.build((None, 4, 4, 2))
    shapes = []

    @tf.function(input_signature=[tf.TensorSpec((None, 4, 4, 2))])
    def call(x):
        shapes.append(layer(x).shape.as_list())

    call(np.ones((3, 4, 4, 2), "float32"))
    assert shapes == [[None, 4, 4, 5]]


def test_a_class_with_its_own_way_keeps_it():
    class Own(layers.Conv2D):
        def convolution_op(self, inputs, kernel):
            return super().convolution_op(inputs, kernel) * 0.0

    own, _ = with_kernels(Own(2, 1, bias_initializer="ones"))
    assert np.all(np.asarray(own(np.ones((1, 2, 2, 1), "float32"))) == 1.0)
    assert "call" not in vars(own)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_model_uses_them_and_gives_them_back(replicas):
    net = keras.Sequential([keras.Input((4, 4, 2)), layers.Conv2D(2, 1)])
    unisono.parallel(net, replicas=replicas)
    net.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(6, 4, 4, 2)).astype("float32")
    net.fit(x, x, batch_size=6, verbose=0)
    assert "call" in vars(net.layers[0])
    unisono.release(net)
    assert "call" not in vars(net.layers[0])
    net.fit(x, x, batch_size=6, verbose=0)


def test_convolutions_of_other_ranks_are_left_alone():
    layer, model = with_kernels(layers.Conv3D(1, 1))
    assert "call" not in vars(layer)
    leave_kernels(model)
    assert layer(np.ones((1, 2, 2, 2, 1), "float32")).shape == (1, 2, 2, 2, 1)
