"""JAX's step on devices that differ in their digits, and with kernels that XLA cannot partition.

CPU devices stand in for GPUs: a layer that computes something else on each device for kernels that
add in any order, and JAX's reference LSTM for cuDNN's.
"""

import importlib
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from twins import BACKEND

if BACKEND != "jax":
    pytest.skip("JAX's step", allow_module_level=True)

import jax
import jax.experimental.rnn as cudnn
from drifting import Drifting
from jax.interpreters import mlir

import unisono
from unisono.backends.jax.devices import ensure_cpu_devices


def rows(count, *shape):
    rng = np.random.default_rng(count)
    return rng.normal(size=(count, *shape)).astype("float32")


# -- a batch that does not divide ------------------------------------------------------------------


def drifting_model(num_devices):
    """Made once JAX has so many devices."""
    keras.utils.set_random_seed(0)
    drift = [Drifting(num_devices)] if num_devices > 1 else []
    layers = [keras.Input((4,)), keras.layers.Dense(8), *drift, keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


@pytest.fixture(autouse=True)
def devices():
    """As many as tests use, before any model is built."""
    ensure_cpu_devices(3)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_agree_on_a_batch_that_each_computes(num_replicas):
    x, y = rows(7, 4), rows(7, 1)
    model = unisono.parallel(drifting_model(num_replicas), replicas=num_replicas)
    history = model.fit(x, y, batch_size=7, epochs=2, verbose=0, validation_data=(x, y)).history
    unisono.check_replicas(model)
    for variable in [*model.variables, *model.metrics_variables]:
        copies = [np.asarray(shard.data) for shard in variable.value.addressable_shards]
        assert all(copy.tobytes() == copies[0].tobytes() for copy in copies), variable.path
    drifting = model.layers[1]
    assert int(drifting.seen_int16) == 0  # The first replica's value.
    assert not np.asarray(drifting.seen_bool)
    assert len(history["val_loss"]) == 2


def test_they_take_over_what_the_first_has_computed():
    x, y = rows(5, 4), rows(5, 1)
    plain = drifting_model(1)
    expected = plain.fit(x, y, batch_size=5, epochs=3, verbose=0).history
    model = unisono.parallel(drifting_model(2), replicas=2)
    found = model.fit(x, y, batch_size=5, epochs=3, verbose=0).history
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-6)
    for variable, wanted in zip(model.trainable_variables, plain.trainable_variables, strict=True):
        np.testing.assert_allclose(variable, wanted, atol=1e-6)


# -- cuDNN's LSTM ----------------------------------------------------------------------------------


@pytest.fixture
def fused_rows(monkeypatch):
    """The number of rows of each LSTM that the stand-in for cuDNN was compiled for."""
    seen = []

    def parts(options):
        sizes = [options[name] for name in ("input_size", "hidden_size", "num_layers")]
        return (*sizes, options["dropout"], options["bidirectional"])

    def forward(x, h_0, c_0, weights, seq_lengths, **options):
        sizes = parts(options)
        unpacked = cudnn.unpack_lstm_weights(weights, *sizes[:3], sizes[4])
        return cudnn.lstm_ref(x, h_0, c_0, *unpacked, seq_lengths, *sizes)

    def lower_forward(x, h_0, c_0, weights, seq_lengths, **options):
        seen.append(x.shape[0])
        reserve = jax.numpy.zeros(1, "float32")
        return (*forward(x, h_0, c_0, weights, seq_lengths, **options), reserve)

    def lower_backward(dy, dh, dc, x, h_0, c_0, weights, y, reserve, seq_lengths, **options):
        def run(*arrays):
            return forward(*arrays, seq_lengths, **options)

        return jax.vjp(run, x, h_0, c_0, weights)[1]((dy, dh, dc))

    sizes = SimpleNamespace(compute_rnn_workspace_reserve_space_sizes=lambda *_: (1, 1))
    monkeypatch.setattr(cudnn, "gpu_rnn", sizes)
    lower = {cudnn.rnn_fwd_p: lower_forward, cudnn.rnn_bwd_p: lower_backward}
    for primitive, function in lower.items():
        rule = mlir.lower_fun(function, multiple_results=True)
        mlir.register_lowering(primitive, rule, platform="cpu")
    # By which Keras decides.
    decides = importlib.import_module("keras.src.backend.jax.rnn")
    monkeypatch.setattr(decides, "_is_gpu_available", lambda: True)
    return seen


def lstm_model(use_cudnn):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    both = layers.LSTM(5, return_sequences=True, use_cudnn=use_cudnn)
    model = keras.Sequential(
        [
            keras.Input((6, 3)),
            layers.Bidirectional(both),
            layers.LSTM(4, go_backwards=True, use_cudnn=use_cudnn),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def test_each_replica_computes_its_own_rows_of_an_lstm(fused_rows):
    x, y = rows(16, 6, 3), rows(16, 1)
    plain = lstm_model(use_cudnn=False)
    expected = plain.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
    assert not fused_rows
    model = unisono.parallel(lstm_model(use_cudnn="auto"), replicas=2)
    found = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
    assert set(fused_rows) == {4}
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for variable, wanted in zip(model.trainable_variables, plain.trainable_variables, strict=True):
        np.testing.assert_allclose(variable, wanted, atol=1e-6)
    unisono.check_replicas(model)


# -- options of the compiler -----------------------------------------------------------------------


def test_cpus_get_no_options_of_gpus():
    from unisono.backends.jax.gpu_options import step_options

    assert step_options(jax.devices("cpu")[0], 1) == {}
