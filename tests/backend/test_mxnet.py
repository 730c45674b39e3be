"""Contexts given at compile time, as Keras on MXNet took them."""

import keras
import pytest
from twins import BACKEND, TOLERANCE, apart, fit, mlp, plain, rows, sgd

import unisono
from unisono.compat import mxnet as mx
from unisono.devices import Placement
from unisono.errors import DeviceError, ModelError


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch):
    monkeypatch.setenv("UNISONO_SIMULATED_GPUS", "4")


def template():
    keras.utils.set_random_seed(7)
    return mlp()


def placement_of(model):
    return vars(model)["_unisono"].placement


@pytest.mark.parametrize(
    ("context", "ids"),
    [
        ([mx.gpu(i) for i in range(2)], (0, 1)),
        ((mx.gpu(0), mx.gpu(2)), (0, 2)),
        (["gpu(0)", "gpu(3)"], (0, 3)),
        ([mx.gpu(), "gpu(1)"], (0, 1)),
        ("gpu(1)", (1,)),
        (mx.gpu(), (0,)),
    ],
    ids=str,
)
def test_gpus(context, ids):
    model = template()
    compiled = mx.compile(model, loss="mse", optimizer=sgd(), context=context)
    assert compiled is model
    assert model.compiled
    assert placement_of(model) == Placement("cpu", ids, is_simulated=True)


@pytest.mark.parametrize("context", [[mx.cpu(0), mx.cpu(1)], ["cpu(0)", "cpu(5)"]], ids=str)
def test_that_many_cpu_replicas(context, monkeypatch):
    monkeypatch.delenv("UNISONO_SIMULATED_GPUS")
    model = mx.compile(template(), sgd(), "mse", context=context)
    assert placement_of(model) == Placement("cpu", (0, 1))


def test_no_context_leaves_the_model_where_it_is():
    model = mx.compile(template(), sgd(), "mse")
    assert model.compiled
    assert "_unisono" not in vars(model)


def test_training_is_that_of_one_device(capsys):
    expected = plain(mlp)
    model = mx.compile(template(), sgd(), loss="mse", context=[mx.gpu(0), mx.gpu(1)])
    assert apart(fit(expected, *rows()), fit(model, *rows())) < TOLERANCE
    assert apart(expected, model) < TOLERANCE
    line = f"unisono: {BACKEND}, 2 replicas on gpu 0, 1 (simulated on the cpu); "
    assert capsys.readouterr().out.splitlines() == [line + "global batch 8 = 2 x 4 per replica"]
    assert {record.devices for record in unisono.where(model)} == {("gpu:0", "gpu:1")}


MESSAGES = [
    (
        [],
        "Asked for context=[], without a device. Name at least one, such as [gpu(0)], or leave "
        "context= out.",
    ),
    (
        [mx.gpu(0), mx.cpu(0)],
        "Asked for context=[gpu(0), cpu(0)], which mixes CPUs and GPUs: each step would "
        "wait for the slower. Name devices of one kind.",
    ),
    (
        [mx.gpu(1), "gpu(1)"],
        "Asked for context=[gpu(1), gpu(1)], which repeats one. Name each once.",
    ),
    (
        ["gpu:0"],
        "Asked for context=['gpu:0']; 'gpu:0' is not a context. Write gpu(0), cpu(0) or a string "
        'such as "gpu(0)".',
    ),
    (
        [0],
        "Asked for context=[0]; 0 is not a context. Write gpu(0), cpu(0) or a string such as "
        '"gpu(0)".',
    ),
    (2, "Asked for context=2; found a int. Give a list such as [gpu(0), gpu(1)]."),
    (
        [mx.gpu(0), mx.gpu(7)],
        "Asked for GPUs [0, 7]; this machine has [0, 1, 2, 3]. Choose among those, or leave gpus= "
        "out to take all.",
    ),
]


@pytest.mark.parametrize(("context", "message"), MESSAGES, ids=[str(c) for c, _ in MESSAGES])
def test_errors_word_by_word(context, message):
    model = template()
    with pytest.raises(DeviceError) as caught:
        mx.compile(model, "sgd", "mse", context=context)
    assert str(caught.value) == message
    assert not model.compiled
    assert "_unisono" not in vars(model)


@pytest.mark.parametrize("device_id", [-1, "0", 1.0, True], ids=str)
def test_ids_that_make_no_sense(device_id):
    with pytest.raises(DeviceError, match="Ids are whole numbers from 0"):
        mx.gpu(device_id)
    with pytest.raises(DeviceError, match="Ids are whole numbers from 0"):
        mx.cpu(device_id)


@pytest.mark.parametrize("context", [None, [mx.gpu(0)]], ids=str)
def test_something_else_than_a_model(context):
    with pytest.raises(ModelError, match="Asked to parallelize a list"):
        mx.compile([], "sgd", "mse", context=context)
