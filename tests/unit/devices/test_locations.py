"""Names of devices, what they stand for, and the records of where values live."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.devices import SIMULATED_GPUS, Placement
from unisono.devices.locations import Locations, find, location, name_of, names_of, parse
from unisono.errors import DeviceError


@pytest.fixture(autouse=True)
def no_simulation(monkeypatch):
    monkeypatch.delenv(SIMULATED_GPUS, raising=False)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cpu", ("cpu", 0)),
        ("cpu:0", ("cpu", 0)),
        ("CPU:3", ("cpu", 3)),
        ("gpu", ("gpu", 0)),
        ("gpu:2", ("gpu", 2)),
        ("GPU:1", ("gpu", 1)),
        ("/gpu:1", ("gpu", 1)),
        ("/device:GPU:1", ("gpu", 1)),
        ("cuda", ("gpu", 0)),
        ("cuda:1", ("gpu", 1)),
        (" gpu:1 ", ("gpu", 1)),
        ("gpu:007", ("gpu", 7)),
    ],
)
def test_names(name, expected):
    assert parse(name) == expected


@pytest.mark.parametrize(
    "name", ["", "gpu:", "gpu:-1", "gpu:1.0", "gpu:one", "gpu 1", "gpu(0)", "tpu:0", "0", "gpu:٣"]
)
def test_texts_that_name_no_device(name):
    with pytest.raises(DeviceError) as caught:
        parse(name)
    assert str(caught.value) == (
        f"Asked for device {name!r}, which names no device. "
        'Write it as "cpu", "gpu" or "gpu:2"; ids are whole numbers from 0.'
    )


@pytest.mark.parametrize(("name", "kind"), [(2, "int"), (None, "NoneType"), (["gpu:0"], "list")])
def test_other_things_than_texts(name, kind):
    with pytest.raises(DeviceError) as caught:
        parse(name)
    assert str(caught.value) == (
        f'Asked for device {name!r}; found a {kind}. Give a name such as "cpu", "gpu" or "gpu:2".'
    )


@given(st.text())
def test_any_text_is_a_device_or_an_error_of_ours(text):
    with contextlib.suppress(DeviceError):
        kind, index = parse(text)
        assert kind in ("cpu", "gpu")
        assert index >= 0


def find_among(name, num_gpus):
    return find(name, num_gpus=lambda: num_gpus, num_cpus=8)


def test_a_gpu_that_is_there():
    assert find_among("gpu:1", 2) == Placement("gpu", (1,))


def test_the_cpu_needs_no_count_of_gpus():
    def refuse():
        raise AssertionError("counting GPUs starts a backend")

    assert find("cpu", num_gpus=refuse, num_cpus=1) == Placement("cpu", (0,))


def test_the_cpu_is_the_device_after_simulated_gpus(monkeypatch):
    monkeypatch.setenv(SIMULATED_GPUS, "4")
    assert find_among("gpu:2", 4) == Placement("cpu", (2,), is_simulated=True)
    assert find_among("cpu", 4) == Placement("cpu", (4,))


@pytest.mark.parametrize(
    ("name", "num_gpus", "message"),
    [
        (
            "gpu:4",
            4,
            "Asked for device 'gpu:4'; this machine has gpu [0, 1, 2, 3]. "
            'Choose among those, or take "cpu".',
        ),
        (
            "gpu:2",
            0,
            "Asked for device 'gpu:2'; the backend sees no GPU on this machine. "
            'Take "cpu", or set UNISONO_SIMULATED_GPUS=3 to rehearse.',
        ),
        (
            "cpu:8",
            0,
            "Asked for device 'cpu:8'; this machine has cpu [0, 1, 2, 3, 4, 5, 6, 7]. "
            "Choose among those.",
        ),
    ],
)
def test_devices_that_are_not_there(name, num_gpus, message):
    with pytest.raises(DeviceError) as caught:
        find_among(name, num_gpus)
    assert str(caught.value) == message


@given(st.integers(1, 8), st.sampled_from(["cpu", "gpu"]), st.data())
def test_a_device_is_found_under_the_name_that_it_answers_to(simulated, kind, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SIMULATED_GPUS, str(simulated))
        name = f"{kind}:{data.draw(st.integers(0, simulated - 1))}"
        placement = find(name, num_gpus=lambda: simulated, num_cpus=simulated)
        assert name_of(placement.kind, placement.indices[0]) == name


def test_names_of_replicas():
    assert names_of(Placement("gpu", (0, 2))) == ["gpu:0", "gpu:2"]
    assert names_of(Placement("cpu", (1,), is_simulated=True)) == ["gpu:1"]


# -- records -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on", "layout"),
    [
        ({"gpu:0": 8}, "single"),
        ({"gpu:0": 8, "gpu:1": 8}, "replicated"),
        ({"gpu:0": 4, "gpu:1": 4}, "sharded"),
    ],
)
def test_layouts(on, layout):
    record = location((2,), 8, on)
    assert (record.layout, record.devices) == (layout, tuple(on))
    assert not record.is_simulated


def test_a_record_in_words(monkeypatch):
    monkeypatch.setenv(SIMULATED_GPUS, "2")
    assert str(location((2,), 8, {"gpu:1": 8})) == (
        "single on gpu:1 (simulated on the cpu), shape (2,), 8 bytes"
    )
    assert str(location((2,), 8, {"cpu:0": 8})) == "single on cpu:0, shape (2,), 8 bytes"


def test_a_table():
    table = Locations(
        [
            location((2, 3), 24, {"gpu:0": 24, "gpu:1": 24}),
            location((4,), 16, {"gpu:1": 16}),
        ]
    )
    assert table.total_bytes == {"gpu:0": 24, "gpu:1": 40}
    assert str(table).splitlines() == [
        "variable  shape   bytes  devices       layout",
        "          (2, 3)     24  gpu:0, gpu:1  replicated",
        "          (4,)       16  gpu:1         single",
        "bytes by device: gpu:0 24, gpu:1 40",
    ]


def test_a_table_of_nothing():
    assert str(Locations()).splitlines()[-1] == "bytes by device: none"
