"""Placement by hand, on simulated GPUs, and where values live."""

import threading

import keras
import numpy as np
import pytest
from scripts import run
from twins import BACKEND, adopted, fit, mlp, plain, rows

import unisono
from unisono.errors import DeviceError, ModelError


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch):
    monkeypatch.setenv("UNISONO_SIMULATED_GPUS", "4")


@pytest.fixture
def no_gpus(monkeypatch):
    monkeypatch.delenv("UNISONO_SIMULATED_GPUS")


def devices_of(value):
    record = unisono.where(value)
    assert record.layout == "single"
    return record.devices


def made():
    return keras.ops.ones((2, 3))


# -- scopes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpu:1", "GPU:1", "/gpu:1", "cuda:1"])
def test_names_of_one_device(name):
    with unisono.device(name):
        assert devices_of(made()) == ("gpu:1",)


def test_ops_tensors_and_variables_go_to_the_device():
    with unisono.device("gpu:2"):
        layer = keras.layers.Dense(2)
        layer.build((None, 3))
        values = [
            made(),
            keras.ops.convert_to_tensor(np.ones(3, "float32")),
            keras.ops.matmul(np.ones((2, 2), "float32"), np.ones((2, 2), "float32")),
            keras.random.normal((3,), seed=1),
            keras.Variable([1.0, 2.0]),
            layer.kernel,
            layer.bias,
            layer(np.ones((1, 3), "float32")),
        ]
    assert [devices_of(value) for value in values] == [("gpu:2",)] * len(values)


def test_values_of_several_devices_meet_on_a_third():
    x = np.arange(4, dtype="float32").reshape(2, 2)
    with unisono.device("gpu:2"):
        a = keras.ops.matmul(x, x)
    with unisono.device("gpu:3"):
        b = keras.ops.matmul(x, x)
    with unisono.device("cpu"):
        total = keras.ops.add(a, b)
        by_operator = a + b
    assert [devices_of(v) for v in (a, b)] == [("gpu:2",), ("gpu:3",)]
    assert [devices_of(v) for v in (total, by_operator)] == [("cpu:0",), ("cpu:0",)]
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(total), 2 * x @ x)


def test_scopes_nest_and_end():
    before = devices_of(made())
    with unisono.device("gpu:1"):
        with unisono.device("gpu:3"):
            assert devices_of(made()) == ("gpu:3",)
        assert devices_of(made()) == ("gpu:1",)
    assert devices_of(made()) == before


def test_a_scope_is_used_again_inside_itself_and_on_a_function():
    before = devices_of(made())
    scope = unisono.device("gpu:1")
    for _ in range(2):
        with scope, unisono.device("gpu:2"), scope:
            assert devices_of(made()) == ("gpu:1",)
    assert devices_of(scope(made)()) == ("gpu:1",)
    assert devices_of(made()) == before


def test_a_scope_belongs_to_its_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(devices_of(made())))
    with unisono.device("gpu:2"):
        thread.start()
        thread.join(60)
    assert found == [devices_of(made())]


def test_an_error_ends_a_scope():
    before = devices_of(made())
    with pytest.raises(KeyError), unisono.device("gpu:1"):
        raise KeyError
    assert devices_of(made()) == before


def test_a_model_trains_where_it_was_built():
    expected = plain()
    fit(expected, *rows())
    with unisono.device("gpu:1"):
        model = plain()
        fit(model, *rows())
    assert {record.devices for record in unisono.where(model)} == {("gpu:1",)}
    for a, b in zip(expected.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_without_simulation_the_cpu_is_the_first(no_gpus):
    with unisono.device("cpu"):
        record = unisono.where(made())
    assert record.devices == ("cpu:0",)
    assert not record.is_simulated


@pytest.mark.parametrize("name", ["gpu:4", "cpu:99", "gpu:-1", "tpu", "", 2])
def test_devices_that_are_not_there(name):
    before = devices_of(made())
    with pytest.raises(DeviceError, match="Asked for device"):
        unisono.device(name)
    assert devices_of(made()) == before


def test_no_gpu_at_all(no_gpus):
    with pytest.raises(DeviceError, match=r"sees no GPU .* UNISONO_SIMULATED_GPUS=2 to rehearse"):
        unisono.device("gpu:1")


# -- where -------------------------------------------------------------------------------------


def test_a_record():
    with unisono.device("gpu:2"):
        record = unisono.where(made())
    assert (record.path, record.shape, record.num_bytes) == ("", (2, 3), 24)
    assert (record.devices, record.device_bytes, record.layout) == (("gpu:2",), (24,), "single")
    assert record.is_simulated


def test_a_variable_has_its_path():
    model = mlp()
    assert unisono.where(model.layers[0].kernel).path == model.layers[0].kernel.path


def test_numpy_is_in_host_memory():
    record = unisono.where(np.ones((2, 3)))
    assert (record.devices, record.num_bytes, record.layout) == (("host",), 48, "single")


def test_a_layer_and_a_model():
    model = mlp()
    table = unisono.where(model)
    assert [record.path for record in table] == [variable.path for variable in model.variables]
    assert [record.shape for record in table] == [(4, 5), (5,), (5, 1), (1,)]
    assert list(table)[:2] == list(unisono.where(model.layers[0]))
    assert sum(table.total_bytes.values()) == 4 * (20 + 5 + 5 + 1)


def test_a_compiled_model_includes_its_optimizer():
    model = plain()
    fit(model, *rows())
    paths = [record.path for record in unisono.where(model)]
    assert paths == [v.path for v in [*model.variables, *model.optimizer.variables]]
    assert [record.path for record in unisono.where(model.optimizer)] == paths[4:]


def test_a_layer_without_variables():
    layer = keras.layers.ReLU()
    layer(made())
    assert unisono.where(layer) == ()


def test_a_parallel_model_is_replicated_until_it_is_released():
    model = unisono.parallel(plain(), gpus=2)
    for _ in range(2):  # Before the first step and after.
        table = unisono.where(model)
        assert {record.layout for record in table} == {"replicated"}
        assert {record.devices for record in table} == {("gpu:0", "gpu:1")}
        assert table.total_bytes["gpu:0"] == table.total_bytes["gpu:1"]
        fit(model, *rows())
    assert len(table) == len(model.variables) + len(model.optimizer.variables)
    assert unisono.where(model.layers[0].kernel).devices == ("gpu:0", "gpu:1")
    assert "gpu:0, gpu:1  replicated" in str(table)
    unisono.release(model)
    assert {record.layout for record in unisono.where(model)} == {"single"}


def test_a_parallel_model_on_chosen_gpus():
    model = unisono.parallel(mlp(), gpus=[1, 3])
    assert {record.devices for record in unisono.where(model)} == {("gpu:1", "gpu:3")}


def test_cpu_replicas_have_their_names(no_gpus):
    assert {record.devices for record in unisono.where(adopted())} == {("cpu:0", "cpu:1")}


def test_a_model_built_at_its_first_step():
    """Its variables appear in `fit`, on all replicas."""
    model = unisono.parallel(plain(lambda: keras.Sequential([keras.layers.Dense(1)])), gpus=2)
    fit(model, *rows())
    assert {record.devices for record in unisono.where(model)} == {("gpu:0", "gpu:1")}


@pytest.mark.skipif(BACKEND != "jax", reason="only JAX splits one array over devices")
def test_a_sharded_array():
    import jax

    with unisono.device("gpu:3"):
        pass  # Now there are four devices.
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("rows",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    record = unisono.where(jax.device_put(np.ones((8, 2), "float32"), sharding))
    assert (record.layout, record.num_bytes) == ("sharded", 64)
    assert record.devices == ("gpu:0", "gpu:1", "gpu:2", "gpu:3")
    assert record.device_bytes == (16,) * 4


@pytest.mark.parametrize("value", [None, "gpu:0", [1.0], object(), 3.0], ids=str)
def test_things_that_live_nowhere(value):
    with pytest.raises(ModelError, match=f"Asked where a {type(value).__name__} lives"):
        unisono.where(value)


def test_symbolic_values_live_nowhere():
    with pytest.raises(ModelError, match="Asked where a KerasTensor lives"):
        unisono.where(keras.Input((3,)))


def test_values_that_are_being_traced_live_nowhere():
    seen = []

    class Look(keras.Layer):
        def call(self, x):
            with pytest.raises(ModelError) as caught:
                unisono.where(x)
            seen.append(str(caught.value))
            return x

    Look()(keras.Input((3,)))
    assert seen
    assert all(message.startswith("Asked where a ") for message in seen)


def test_what_is_not_built_lives_nowhere():
    with pytest.raises(ModelError, match="it has no variables yet"):
        unisono.where(keras.Sequential([keras.layers.Dense(2)]))


# -- the log -----------------------------------------------------------------------------------


def test_the_log(capsys):
    with unisono.device("gpu:2"):
        x = made()
        unisono.log_placement()
        unisono.log_placement(True)
        keras.ops.matmul(x, keras.ops.transpose(x))
        unisono.log_placement(False)
        keras.ops.add(x, x)
    said = capsys.readouterr().out.splitlines()
    if BACKEND == "tensorflow":
        assert "unisono: tensorflow ran MatMul on gpu:2" in said
        assert not [line for line in said if "Add" in line]
    else:
        assert len(said) == 2
        assert all(line.startswith(f"unisono: {BACKEND} ") for line in said)
        assert all("unisono.where(" in line for line in said)


# -- a program of its own ----------------------------------------------------------------------

PROGRAM = """
import keras, unisono

names = ["gpu:2", "gpu:3"]
products = []
for name in names:
    with unisono.device(name):
        x = keras.ops.ones((2, 2))
        products.append(keras.ops.matmul(x, x))
with unisono.device("cpu"):
    total = keras.ops.add(*products)
print(*(unisono.where(value).devices[0] for value in [*products, total]), float(total[0, 0]))
"""


def test_the_program_of_a_product_on_two_devices():
    """From a cold start; the other tests begin with a backend that runs."""
    done = run("-c", PROGRAM, UNISONO_SIMULATED_GPUS="4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["gpu:2", "gpu:3", "cpu:0", "4.0"]
