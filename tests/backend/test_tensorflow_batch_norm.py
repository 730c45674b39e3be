"""Batch norm of images on TensorFlow's CPU kernels: what Keras' formula gives, with gradients."""

import keras
import numpy as np
import pytest
from keras import layers
from twins import BACKEND

if BACKEND != "tensorflow":
    pytest.skip("TensorFlow's kernels", allow_module_level=True)

import tensorflow as tf

from unisono.backends.tensorflow import cpu_batch_norm as tensorflow_batch_norm
from unisono.backends.tensorflow.cpu_layers import leave_kernels, use_kernels


def with_kernels(layer):
    """The layer, which computes by them from now on, and a model that holds it."""
    model = keras.Sequential([layer])
    use_kernels(model, lambda: None, is_alone=True)
    return layer, model


def norm_of(shape, **options):
    layer = layers.BatchNormalization(momentum=0.7, **options)
    layer.build(shape)
    rng = np.random.default_rng(1)
    for variable in layer.trainable_variables:
        variable.assign(rng.normal(1.0, 0.3, variable.shape))
    return layer


def rows(shape):
    return np.random.default_rng(0).normal(1.5, 2.0, shape).astype("float32")


def everything(layer, x, above, shape):
    """Outputs, gradients of the inputs and of every weight, and the moved statistics."""
    x, above = (array.astype(layer.compute_dtype) for array in (x, above))

    @tf.function(input_signature=[tf.TensorSpec(shape, x.dtype)] * 2)
    def step(x, above):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        weights = [variable.value for variable in layer.trainable_variables]
        return [y, *tape.gradient(y, [x, *weights], above)]

    found = step(x, above)
    moved = [variable.value for variable in layer.non_trainable_variables]
    return [np.asarray(value) for value in [*found, *moved]]


@pytest.mark.parametrize("shape", [(6, 5, 4, 3), (2, 40, 40, 2), (3, 1, 1, 4), (1, 7, 11, 1)])
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("options", [{}, {"scale": False}, {"center": False, "epsilon": 1e-5}])
def test_images_as_keras_has_them_in_double_precision(shape, is_known, options):
    # Without a mean, which would be all of it: what is left of a large sum has few digits.
    x, above = rows(shape), np.random.default_rng(2).normal(size=shape).astype("float32")
    traced = shape if is_known else (None, *shape[1:])
    ours = everything(with_kernels(norm_of(shape, **options))[0], x, above, traced)
    right = everything(norm_of(shape, dtype="float64", **options), x, above, traced)
    for mine, exact in zip(ours, right, strict=True):
        np.testing.assert_allclose(mine, exact, atol=1e-6 * np.abs(exact).max(), rtol=0)


def test_the_kernels_are_used(monkeypatch):
    calls = []
    plain = tensorflow_batch_norm._statistics
    monkeypatch.setattr(
        tensorflow_batch_norm, "_statistics", lambda x: calls.append(x.shape) or plain(x)
    )
    layer, _ = with_kernels(norm_of((4, 3, 3, 2)))
    layer(rows((4, 3, 3, 2)), training=True)
    assert calls == [(4, 3, 3, 2)]


def test_many_rows_lose_no_digits():
    x = np.random.default_rng(0).uniform(3.0, 4.0, (64, 64, 64, 1)).astype("float32")
    layer, _ = with_kernels(norm_of(x.shape))
    layer(x, training=True)
    moved = keras.ops.convert_to_numpy(layer.moving_variance)
    assert moved == pytest.approx(0.7 + 0.3 * x.astype("float64").var(), rel=1e-6)


def test_gradients_of_gradients():
    @tf.function
    def penalty(layer, x):
        weights = [layer.gamma.value, layer.beta.value]
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(tf.sin(layer(x, training=True)))
            slope = inner.gradient(y, x)
            found = tf.reduce_sum(slope**2)
        return outer.gradient(found, [x, *weights])

    x = tf.constant(rows((4, 3, 3, 2)))
    plain, (ours, _) = norm_of(x.shape), with_kernels(norm_of(x.shape))
    for mine, right in zip(penalty(ours, x), penalty(plain, x), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("num_pixels", "pieces"), [(1, 1), (32, 1), (225, 9), (1024, 32), (37, 37)]
)
def test_pieces_hold_few_pixels_each(num_pixels, pieces):
    assert tensorflow_batch_norm._num_pieces(tf.zeros((1, 1, num_pixels, 1))) == pieces


def test_where_keras_own_formula_stays():
    """Masks, other shapes and types, inference, and a class that has its own way."""

    class Own(layers.BatchNormalization):
        def call(self, inputs, training=None, mask=None):
            return inputs + 1.0

    class OwnMoments(layers.BatchNormalization):
        def _moments(self, inputs, mask):
            return super()._moments(inputs, mask)

    x = tf.ones((2, 3, 3, 2))
    for kind in (Own, OwnMoments):
        assert "call" not in vars(with_kernels(kind())[0])
    layer = norm_of((2, 3, 3, 2))
    before = np.asarray(layer(x, training=False))
    layer, model = with_kernels(layer)
    np.testing.assert_array_equal(layer(x, training=False), before)
    mask = tf.ones((2, 3, 3), tf.bool)
    for inputs, given, options in [
        (x, mask, {}),
        (tf.ones((2, 3, 2)), None, {}),
        (tf.ones((2, 2, 3, 3)), None, {"axis": 1}),
        (tf.ones((2, 3, 3, 2), tf.float64), None, {}),
        (x, None, {"renorm": True}),
    ]:
        asked = norm_of(inputs.shape, **options)
        assert not tensorflow_batch_norm.can_normalize(asked, inputs, given, None)
        assert with_kernels(asked)[0](inputs, training=True, mask=given).shape == inputs.shape
    leave_kernels(model)
    assert "call" not in vars(layer)


def test_xla_gets_the_formula(monkeypatch):
    """Its own batch norm loses digits where a mean is large."""
    monkeypatch.setattr(tensorflow_batch_norm, "_statistics", None)
    x = rows((4, 3, 3, 2)) + 1000.0
    layer, _ = with_kernels(norm_of(x.shape))
    outputs = tf.function(lambda x: layer(x, training=True), jit_compile=True)(x)
    np.testing.assert_allclose(outputs, norm_of(x.shape)(x, training=True), rtol=0, atol=1e-3)


def test_layers_that_are_mapped_over_time_get_the_formula():
    norm = layers.BatchNormalization()
    model = keras.Sequential([keras.Input((None, 3, 3, 2)), layers.TimeDistributed(norm)])
    use_kernels(model, lambda: None, is_alone=True)
    assert "call" not in vars(norm)


def test_gradients_of_gradients_outside_of_a_function():
    def penalty(layer, x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(tf.sin(layer(x, training=True)))
            found = tf.reduce_sum(inner.gradient(y, x) ** 2)
        return outer.gradient(found, x)

    x = tf.constant(rows((4, 3, 3, 2)))
    mine, right = penalty(with_kernels(norm_of(x.shape))[0], x), penalty(norm_of(x.shape), x)
    np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-5)
