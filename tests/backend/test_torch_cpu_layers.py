"""Layers that torch computes in a cheaper way on CPUs: the same outputs, gradients and state."""

import keras
import numpy as np
import pytest
from keras import layers
from twins import BACKEND

import unisono

if BACKEND != "torch":
    pytest.skip("torch's layers", allow_module_level=True)

import torch

from unisono.backends.torch.cpu_layers import CpuLayers
from unisono.backends.torch.framework import TorchFramework

# More rows than one piece of a sum has, and a last piece of its own size.
SHAPES = [(3, 5, 4, 6), (70, 9, 7, 5), (1, 50, 60, 3)]
NORMS = {
    f"norm {options} {shape}": (lambda options=options: norm(**options), shape)
    for options in ({}, {"scale": False}, {"center": False}, {"axis": 1})
    for shape in SHAPES
}
IMAGES = {
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
CASES = {**NORMS, **{name: (make, (3, 9, 8, 3)) for name, make in IMAGES.items()}}


def norm(**options):
    scales = keras.initializers.RandomUniform(0.5, 2.0, seed=1)
    return layers.BatchNormalization(momentum=0.7, gamma_initializer=scales, **options)


def replaced(layer):
    CpuLayers(TorchFramework.cpu_layers).use_kernels(
        keras.Sequential([layer]), lambda: None, sync_batch_norm=False
    )
    return layer


def everything(layer, x):
    """Outputs, gradients and state of one training call."""
    inputs = torch.tensor(x, requires_grad=True)
    y = layer(inputs, training=True)
    torch.sum(torch.sin(y.float())).backward()
    gradients = [variable.value.grad for variable in layer.trainable_variables]
    found = [y, inputs.grad, *gradients, *(v.value for v in layer.non_trainable_variables)]
    return [tensor.detach().to(torch.float64).numpy() for tensor in found]


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_keras(case):
    make, shape = CASES[case]
    x = np.random.default_rng(0).normal(0.5, 2.0, shape).astype("float32")
    results = []
    for change in (replaced, lambda layer: layer):
        keras.utils.set_random_seed(1)
        layer = change(make())
        layer.build(shape)
        results.append(everything(layer, x))
    for mine, right in zip(*results, strict=True):
        is_norm = isinstance(layer, layers.BatchNormalization)
        limits = {"atol": 3e-6 * np.abs(right).max(), "rtol": 0} if is_norm else {"atol": 1e-5}
        np.testing.assert_allclose(mine, right, **{"rtol": 1e-5, **limits})


def test_many_rows_lose_no_digits():
    x = np.random.default_rng(0).uniform(3.0, 4.0, (64, 64, 64, 1)).astype("float32")
    layer = replaced(norm())
    layer(torch.tensor(x), training=True)
    moved = keras.ops.convert_to_numpy(layer.moving_variance)
    assert moved == pytest.approx(0.7 + 0.3 * x.astype("float64").var(), rel=1e-6)


def test_gradients_of_gradients():
    def penalty(layer):
        x = torch.tensor(np.random.default_rng(0).normal(size=(4, 3, 3, 2)).astype("float32"))
        x.requires_grad = True
        y = torch.sum(torch.sin(layer(x, training=True)))
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        torch.sum(slope**2).backward()
        return x.grad.numpy(), layer.gamma.value.grad.numpy()

    for mine, right in zip(penalty(replaced(norm())), penalty(norm()), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-5)


def test_what_has_no_replacement_stays():
    """Masks, other ranks, inference, and a class with its own `call`."""

    class Own(layers.BatchNormalization):
        def call(self, inputs, training=None, mask=None):
            return inputs + 1.0

    x = torch.ones((2, 3, 3, 2))
    assert torch.equal(replaced(Own())(x, training=True), x + 1.0)
    layer = norm()
    before = layer(x, training=False)
    assert torch.equal(replaced(layer)(x, training=False), before)
    mask = torch.ones((2, 3, 3), dtype=torch.bool)
    assert layer(x, training=True, mask=mask).shape == x.shape
    assert replaced(layers.Conv3D(1, 1))(torch.ones((1, 2, 2, 2, 1))).shape == (1, 2, 2, 2, 1)


@pytest.mark.parametrize("layer", [layers.Conv2D(96, 3, padding="same"), layers.MaxPooling2D()])
def test_images_stay_in_their_layout(layer):
    assert replaced(layer)(torch.ones((2, 8, 8, 96))).is_contiguous()


def fitted(*, is_parallel=True):
    """Which layers of a model were replaced while it trained and after, and its weights."""
    keras.utils.set_random_seed(1)
    parts = [layers.Conv2D(2, 1), layers.MaxPooling2D(1), layers.BatchNormalization()]
    net = keras.Sequential([keras.Input((4, 4, 2)), *parts])
    if is_parallel:
        unisono.parallel(net, **({} if unisono.topology().world_size > 1 else {"replicas": 2}))
    net.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(6, 4, 4, 2)).astype("float32")
    net.fit(x, x, batch_size=6, verbose=0)
    during = ["call" in vars(layer) for layer in net.layers]
    if is_parallel:
        unisono.release(net)
    return during, ["call" in vars(layer) for layer in net.layers], net.get_weights()


def test_a_users_own_process_computes_as_keras_does():
    during, after, _ = fitted()
    assert not any(during + after)


def test_processes_of_a_run_replace_all_and_give_them_back():
    expected = fitted(is_parallel=False)[-1]
    for during, after, weights in unisono.spawn(fitted, replicas=2):
        assert all(during)
        assert not any(after)
        for mine, right in zip(weights, expected, strict=True):
            np.testing.assert_allclose(mine, right, atol=1e-5)
