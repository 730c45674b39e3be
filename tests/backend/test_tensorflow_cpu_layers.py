"""Layers that are replaced on CPUs compute what Keras' own compute, with gradients, and where."""

import importlib

import keras
import numpy as np
import pytest
from keras import layers
from twins import BACKEND

import unisono

if BACKEND != "tensorflow":
    pytest.skip("TensorFlow's kernels", allow_module_level=True)

import tensorflow as tf


@pytest.fixture
def launched(monkeypatch):
    """As in a process that `unisono run` started."""
    module = importlib.import_module("unisono.topology")
    monkeypatch.setattr(module, "_settled", unisono.Topology(launcher="unisono"))


def replaced(layer):
    """A layer of a parallel model, and the model, which keeps it that way."""
    return layer, unisono.parallel(keras.Sequential([layer]), replicas=1)


def is_replaced(layer):
    return "call" in vars(layer)


def normal(shape, mean=0.0, deviation=1.0, seed=0):
    return np.random.default_rng(seed).normal(mean, deviation, shape).astype("float32")


# -- where ----------------------------------------------------------------------------------------


def net():
    keras.utils.set_random_seed(1)
    stack = [layers.Conv2D(3, 1), layers.Conv2D(2, 3), layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((4, 4, 2)), *stack, layers.Flatten(), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_launched_process_uses_them_until_release(launched, replicas):
    x, y = normal((7, 4, 4, 2)), normal((7, 1))
    plain, model = net(), unisono.parallel(net(), replicas=replicas)
    for one in (plain, model):
        one.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert list(map(is_replaced, model.layers)) == [True, True, True, False, False]
    pairs = zip(plain.get_weights(), model.get_weights(), strict=True)
    assert max(np.abs(a - b).max() for a, b in pairs) <= 1e-5
    unisono.release(model)
    assert not any(map(is_replaced, model.layers))
    model.fit(x, y, verbose=0)


def test_a_users_own_process_computes_what_keras_computes():
    model = unisono.parallel(net(), replicas=1)
    assert not any(map(is_replaced, model.layers))


@pytest.mark.parametrize(
    ("switch", "expected"),
    [("0", []), ("1", [0, 1, 2]), ("batch_norm", [2]), ("conv_1x1,conv_bias", [0, 1])],
)
def test_the_switch_names_the_layers(launched, monkeypatch, switch, expected):
    monkeypatch.setenv("UNISONO_CPU_LAYERS", switch)
    model = unisono.parallel(net(), replicas=1)
    assert [i for i, layer in enumerate(model.layers) if is_replaced(layer)] == expected


class OwnConvolution(layers.Conv2D):
    def convolution_op(self, inputs, kernel):
        return super().convolution_op(inputs, kernel) * 0.0


class OwnCall(layers.BatchNormalization):
    def call(self, inputs, training=None, mask=None):
        return inputs + 1.0


class OwnMoments(layers.BatchNormalization):
    def _moments(self, inputs, mask):
        return super()._moments(inputs, mask)


@pytest.mark.parametrize(
    "layer", [OwnConvolution(2, 1), layers.Conv3D(1, 1), OwnCall(), OwnMoments()]
)
def test_other_classes_are_left_alone(launched, layer):
    assert not is_replaced(replaced(layer)[0])


def test_layers_that_are_mapped_over_time_are_left_alone(launched):
    norm = layers.BatchNormalization()
    model = keras.Sequential([keras.Input((None, 3, 3, 2)), layers.TimeDistributed(norm)])
    unisono.parallel(model, replicas=1)
    assert not is_replaced(norm)


# -- convolutions ---------------------------------------------------------------------------------


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


def convolved(layer, x, shape):
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
def test_convolutions(launched, kind, shape):
    x = normal((3, 9, 8, 3))
    found = []
    for change in (replaced, lambda layer: (layer, None)):
        keras.utils.set_random_seed(1)
        layer = CONVOLUTIONS[kind]()
        layer.build(x.shape)
        layer, _model = change(layer)
        found.append(convolved(layer, x, shape))
    for mine, right in zip(*found, strict=True):
        np.testing.assert_allclose(mine, right, atol=2e-6 * np.abs(right).max(), rtol=0)


# -- batch norm -----------------------------------------------------------------------------------


def norm_of(shape, **options):
    layer = layers.BatchNormalization(momentum=0.7, **options)
    layer.build(shape)
    for seed, variable in enumerate(layer.trainable_variables):
        variable.assign(normal(variable.shape, 1.0, 0.3, seed))
    return layer


def normalized(layer, x, above, shape):
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
def test_batch_norm_is_as_exact_as_in_double_precision(launched, shape, is_known, options):
    # Gradients have no mean, of which few digits would be left.
    x, above = normal(shape, 1.5, 2.0), normal(shape, seed=2)
    traced = shape if is_known else (None, *shape[1:])
    ours, _model = replaced(norm_of(shape, **options))
    right = normalized(norm_of(shape, dtype="float64", **options), x, above, traced)
    for mine, exact in zip(normalized(ours, x, above, traced), right, strict=True):
        np.testing.assert_allclose(mine, exact, atol=1e-6 * np.abs(exact).max(), rtol=0)


def test_many_rows_lose_no_digits(launched):
    x = np.random.default_rng(0).uniform(3.0, 4.0, (64, 64, 64, 1)).astype("float32")
    layer, _model = replaced(norm_of(x.shape))
    layer(x, training=True)
    moved = keras.ops.convert_to_numpy(layer.moving_variance)
    assert moved == pytest.approx(0.7 + 0.3 * x.astype("float64").var(), rel=1e-6)


@pytest.mark.parametrize("compiled", [tf.function, lambda function: function])
def test_gradients_of_gradients(launched, compiled):
    @compiled
    def penalty(layer, x):
        weights = [layer.gamma.value, layer.beta.value]
        with tf.GradientTape() as outer:
            outer.watch([x, *weights])
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(tf.sin(layer(x, training=True)))
            found = tf.reduce_sum(inner.gradient(y, x) ** 2)
        return outer.gradient(found, [x, *weights])

    x = tf.constant(normal((4, 3, 3, 2), 1.5, 2.0))
    ours, _model = replaced(norm_of(x.shape))
    for mine, right in zip(penalty(ours, x), penalty(norm_of(x.shape), x), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-5)


def is_fused(layer, inputs, jit_compile=None, **options):
    """Whether a layer's graph has TensorFlow's fused kernels."""
    function = tf.function(lambda x: layer(x, **options), jit_compile=jit_compile)
    graph = function.get_concrete_function(inputs).graph
    return any(op.type.startswith("FusedBatchNorm") for op in graph.get_operations())


@pytest.mark.parametrize(
    ("inputs", "call", "options"),
    [
        (tf.ones((2, 3, 3, 2)), {"mask": tf.ones((2, 3, 3), tf.bool)}, {}),
        (tf.ones((2, 3, 3, 2)), {"training": False}, {}),
        (tf.ones((2, 3, 2)), {}, {}),
        (tf.ones((2, 2, 3, 3)), {}, {"axis": 1}),
        (tf.ones((2, 3, 3, 2), tf.float64), {}, {"dtype": "float64"}),
        (tf.ones((2, 3, 3, 2)), {}, {"renorm": True}),
        # XLA's own batch norm loses digits where a mean is large.
        (tf.ones((2, 3, 3, 2)), {"jit_compile": True}, {}),
    ],
    ids=["mask", "inference", "rank", "axis", "type", "renorm", "xla"],
)
def test_where_keras_own_formula_stays(launched, inputs, call, options):
    layer, _model = replaced(norm_of(inputs.shape, **options))
    assert not is_fused(layer, inputs, **{"training": True, **call})


def test_images_go_through_the_fused_kernels(launched):
    layer, _model = replaced(norm_of((2, 3, 3, 2)))
    assert is_fused(layer, tf.ones((2, 3, 3, 2)), training=True)
