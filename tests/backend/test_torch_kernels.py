"""Layers for images on torch's kernels: what Keras' own ways give, and their gradients."""

import keras
import numpy as np
import pytest
from keras import layers
from twins import BACKEND

import unisono

if BACKEND != "torch":
    pytest.skip("torch's kernels", allow_module_level=True)

import torch

from unisono.backends.torch.cpu_layers import leave_kernels, use_kernels

# More rows than one piece of a sum has, and a last piece of its own size.
SHAPES = [(3, 5, 4, 6), (70, 9, 7, 5), (1, 50, 60, 3)]


def with_kernels(layer):
    """The layer, which computes by them from now on, and a model that holds it."""
    model = keras.Sequential([layer])
    use_kernels(model, lambda: None, sync_batch_norm=False, is_alone=True)
    return layer, model


def norm_of(shape, **options):
    layer = layers.BatchNormalization(momentum=0.7, **options)
    layer.build(shape)
    draw = np.random.default_rng(1)
    for variable in layer.trainable_variables:
        variable.assign(draw.uniform(0.5, 2.0, variable.shape))
    return layer


def everything(layer, x, above):
    """Outputs, gradients and moving statistics of one training call."""
    x = torch.tensor(x, requires_grad=True)
    y = layer(x, training=True)
    y.backward(torch.tensor(above, dtype=y.dtype))
    gradients = [variable.value.grad for variable in layer.trainable_variables]
    found = [y, x.grad, *gradients, *(v.value for v in layer.non_trainable_variables)]
    return [tensor.detach().to(torch.float64).numpy() for tensor in found]


@pytest.mark.parametrize("options", [{}, {"scale": False}, {"center": False}, {"axis": 1}])
@pytest.mark.parametrize("shape", SHAPES)
def test_as_the_formula(shape, options):
    draw = np.random.default_rng(0)
    x = draw.normal(0.5, 2.0, shape).astype("float32")
    above = draw.normal(size=shape).astype("float32")
    layer, _ = with_kernels(norm_of(shape, **options))
    ours = everything(layer, x, above)
    theirs = everything(norm_of(shape, **options), x, above)
    for mine, right in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, right, atol=3e-6 * np.abs(right).max(), rtol=0)


def test_many_rows_lose_no_digits():
    x = np.random.default_rng(0).uniform(3.0, 4.0, (64, 64, 64, 1)).astype("float32")
    layer, _ = with_kernels(norm_of(x.shape))
    layer(torch.tensor(x), training=True)
    moved = keras.ops.convert_to_numpy(layer.moving_variance)
    assert moved == pytest.approx(0.7 + 0.3 * x.astype("float64").var(), rel=1e-6)


def test_gradients_of_gradients():
    def penalty(layer, x):
        x = torch.tensor(x, requires_grad=True)
        y = torch.sum(torch.sin(layer(x, training=True)))
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        torch.sum(slope**2).backward()
        return x.grad.numpy(), layer.gamma.value.grad.numpy()

    x = np.random.default_rng(0).normal(size=(4, 3, 3, 2)).astype("float32")
    plain, (ours, _) = norm_of(x.shape), with_kernels(norm_of(x.shape))
    for mine, right in zip(penalty(ours, x), penalty(plain, x), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-5)


def test_where_keras_own_formula_stays():
    """Masks, other shapes, inference, and a class that has its own way."""

    class Own(layers.BatchNormalization):
        def call(self, inputs, training=None, mask=None):
            return inputs + 1.0

    x = torch.ones((2, 3, 3, 2))
    own, _ = with_kernels(Own())
    assert torch.equal(own(x, training=True), x + 1.0)
    layer = norm_of((2, 3, 3, 2))
    before = layer(x, training=False)
    layer, model = with_kernels(layer)
    assert torch.equal(layer(x, training=False), before)
    mask = torch.ones((2, 3, 3), dtype=torch.bool)
    assert layer(x, training=True, mask=mask).shape == x.shape
    leave_kernels(model)
    assert "call" not in vars(layer)


IMAGE_LAYERS = {
    "conv": lambda: layers.Conv2D(5, 3, padding="same", activation="relu"),
    "no bias": lambda: layers.Conv2D(5, 2, use_bias=False),
    "strides": lambda: layers.Conv2D(5, 4, strides=2, padding="same"),
    "dilation": lambda: layers.Conv2D(5, 3, dilation_rate=2, padding="same"),
    "groups": lambda: layers.Conv2D(6, 3, groups=3),
    "half": lambda: layers.Conv2D(5, 3, dtype="mixed_bfloat16"),
    "max": lambda: layers.MaxPooling2D(3, strides=2),
    "max same": lambda: layers.MaxPooling2D(2, padding="same"),
    "average": lambda: layers.AveragePooling2D(3),
    "average same": lambda: layers.AveragePooling2D(3, strides=2, padding="same"),
}


@pytest.mark.parametrize("kind", IMAGE_LAYERS)
def test_images_as_keras_has_them(kind):
    x = np.random.default_rng(0).normal(size=(3, 9, 8, 3)).astype("float32")

    def found(change):
        keras.utils.set_random_seed(1)
        layer = change(IMAGE_LAYERS[kind]())
        layer.build(x.shape)
        inputs = torch.tensor(x, requires_grad=True)
        y = layer(inputs)
        torch.sum(torch.sin(y.float())).backward()
        tensors = [y, inputs.grad, *(v.value.grad for v in layer.trainable_variables)]
        return [tensor.detach().float().numpy() for tensor in tensors]

    for mine, right in zip(found(lambda c: with_kernels(c)[0]), found(lambda c: c), strict=True):
        np.testing.assert_allclose(mine, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layer", [layers.Conv2D(96, 3, padding="same"), layers.MaxPooling2D()])
def test_images_stay_in_their_layout(layer):
    layer, _ = with_kernels(layer)
    assert layer(torch.ones((2, 8, 8, 96))).is_contiguous()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_model_uses_them_and_gives_them_back(replicas):
    kinds = [layers.Conv2D(2, 1), layers.MaxPooling2D(1), layers.BatchNormalization()]
    net = keras.Sequential([keras.Input((4, 4, 2)), *kinds])
    unisono.parallel(net, replicas=replicas)
    net.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(6, 4, 4, 2)).astype("float32")
    net.fit(x, x, batch_size=6, verbose=0)
    assert all("call" in vars(layer) for layer in net.layers)
    unisono.release(net)
    assert not any("call" in vars(layer) for layer in net.layers)


def test_layers_that_share_their_call_are_given_back():
    layer, model = with_kernels(layers.Conv3D(1, 1))
    layer(torch.ones((1, 2, 2, 2, 1)))
    leave_kernels(model)
    assert "call" not in vars(layer)
