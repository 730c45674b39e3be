"""Which devices are chosen for what was asked and found, and what is said when it cannot be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.devices import (
    REPLICAS,
    SIMULATED_GPUS,
    Placement,
    choose,
    default_replicas,
    num_gpus,
    simulated_gpus,
)
from unisono.errors import DeviceError


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in (REPLICAS, SIMULATED_GPUS, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("replicas", "gpus", "found", "kind", "indices"),
    [
        (None, None, 0, "cpu", (0,)),
        (None, None, 1, "gpu", (0,)),
        (None, None, 4, "gpu", (0, 1, 2, 3)),
        (1, None, 0, "cpu", (0,)),
        (3, None, 0, "cpu", (0, 1, 2)),
        (1, None, 4, "gpu", (0,)),
        (3, None, 4, "gpu", (0, 1, 2)),
        (None, 2, 4, "gpu", (0, 1)),
        (None, [0, 2], 4, "gpu", (0, 2)),
        (None, (3, 1), 4, "gpu", (3, 1)),
        (None, range(1, 3), 4, "gpu", (1, 2)),
        (2, [1, 3], 4, "gpu", (1, 3)),
        (2, 2, 2, "gpu", (0, 1)),
    ],
)
def test_choice(replicas, gpus, found, kind, indices):
    placement = choose(replicas=replicas, gpus=gpus, num_visible_gpus=found)
    assert placement == Placement(kind, indices)
    assert placement.num_replicas == len(indices)


@pytest.mark.parametrize(
    ("replicas", "gpus", "found", "message"),
    [
        (0, None, 0, "Asked for replicas=0. Give a whole number of at least 1."),
        (-2, None, 4, "Asked for replicas=-2. Give a whole number of at least 1."),
        (True, None, 0, "Asked for replicas=True. Give a whole number of at least 1."),
        ("2", None, 0, "Asked for replicas='2'. Give a whole number of at least 1."),
        (2.0, None, 0, "Asked for replicas=2.0. Give a whole number of at least 1."),
        (None, 0, 4, "Asked for gpus=0. Give a whole number of at least 1."),
        (None, -1, 4, "Asked for gpus=-1. Give a whole number of at least 1."),
        (
            None,
            True,
            4,
            "Asked for gpus=True; found a bool. "
            "Give a number of GPUs (gpus=2) or a list of their ids (gpus=[0, 2]).",
        ),
        (
            None,
            "0,1",
            4,
            "Asked for gpus='0,1'; found a str. "
            "Give a number of GPUs (gpus=2) or a list of their ids (gpus=[0, 2]).",
        ),
        (
            None,
            {0, 1},
            4,
            "Asked for gpus={0, 1}; found a set. "
            "Give a number of GPUs (gpus=2) or a list of their ids (gpus=[0, 2]).",
        ),
        (
            None,
            [],
            4,
            "Asked for gpus=[]: no GPU at all. "
            "Name at least one id, or leave gpus= out to take all.",
        ),
        (
            None,
            ["0", "1"],
            4,
            "Asked for gpus=['0', '1']; '0' is not a GPU id. Ids are whole numbers from 0.",
        ),
        (
            None,
            [0, True],
            4,
            "Asked for gpus=[0, True]; True is not a GPU id. Ids are whole numbers from 0.",
        ),
        (
            None,
            [0, -1],
            0,
            "Asked for gpus=[0, -1]; -1 is not a GPU id. Ids are whole numbers from 0.",
        ),
        (
            None,
            [1, 1],
            4,
            "Asked for gpus=[1, 1], which repeats an id. Name each GPU once.",
        ),
        (
            None,
            [0, 5],
            4,
            "Asked for GPUs [0, 5]; this machine has [0, 1, 2, 3]. "
            "Choose among those, or leave gpus= out to take all.",
        ),
        (
            None,
            3,
            2,
            "Asked for GPUs [0, 1, 2]; this machine has [0, 1]. "
            "Choose among those, or leave gpus= out to take all.",
        ),
        (
            None,
            [0, 2],
            0,
            "Asked for GPUs [0, 2]; the backend sees no GPU on this machine. Ask for replicas=2 "
            "to train on CPU replicas, or set UNISONO_SIMULATED_GPUS=3 to rehearse.",
        ),
        (
            8,
            None,
            4,
            "Asked for replicas=8; this machine has 4 GPU(s): [0, 1, 2, 3]. "
            "Ask for at most 4, or leave replicas= out to take all.",
        ),
        (
            3,
            [0, 1],
            4,
            "Asked for replicas=3 on gpus=[0, 1], which is 2 GPUs. "
            "Leave one of the two out, or make them agree.",
        ),
    ],
)
def test_what_cannot_be_done_says_what_to_do(replicas, gpus, found, message):
    with pytest.raises(DeviceError) as caught:
        choose(replicas=replicas, gpus=gpus, num_visible_gpus=found)
    assert str(caught.value) == message


@given(
    replicas=st.none() | st.integers(-2, 9),
    gpus=st.none() | st.integers(-2, 9) | st.lists(st.integers(-2, 9), max_size=5),
    found=st.integers(0, 8),
)
def test_every_request_is_met_exactly_or_refused(replicas, gpus, found):
    try:
        placement = choose(replicas=replicas, gpus=gpus, num_visible_gpus=found)
    except DeviceError:
        return
    assert len(set(placement.indices)) == placement.num_replicas >= 1
    if replicas is not None:
        assert placement.num_replicas == replicas
    if gpus is not None:
        assert placement.indices == tuple(range(gpus) if isinstance(gpus, int) else gpus)
    if placement.kind == "gpu":
        assert max(placement.indices) < found
    else:
        assert found == 0
        assert gpus is None


class TestEnvironment:
    def test_replicas_is_the_default(self, monkeypatch):
        monkeypatch.setenv(REPLICAS, "3")
        assert default_replicas() == 3
        assert choose(replicas=None, gpus=None, num_visible_gpus=0).num_replicas == 3
        assert choose(replicas=None, gpus=None, num_visible_gpus=4).indices == (0, 1, 2)

    def test_an_argument_is_stronger_than_the_default(self, monkeypatch):
        monkeypatch.setenv(REPLICAS, "3")
        assert choose(replicas=2, gpus=None, num_visible_gpus=0).num_replicas == 2
        assert choose(replicas=None, gpus=[1], num_visible_gpus=4).indices == (1,)

    def test_too_many_by_default_names_the_variable(self, monkeypatch):
        monkeypatch.setenv(REPLICAS, "5")
        with pytest.raises(DeviceError) as caught:
            choose(replicas=None, gpus=None, num_visible_gpus=2)
        assert str(caught.value) == (
            "Asked for UNISONO_REPLICAS=5; this machine has 2 GPU(s): [0, 1]. "
            "Ask for at most 2, or unset it to take all."
        )

    def test_simulated_gpus_answer_as_gpus_on_the_cpu(self, monkeypatch):
        monkeypatch.setenv(SIMULATED_GPUS, "4")
        assert simulated_gpus() == num_gpus() == 4
        every = choose(replicas=None, gpus=None, num_visible_gpus=0)
        assert every == Placement("cpu", (0, 1, 2, 3), is_simulated=True)
        two = choose(replicas=None, gpus=[0, 2], num_visible_gpus=0)
        assert two == Placement("cpu", (0, 2), is_simulated=True)

    def test_simulated_gpus_hide_real_ones(self, monkeypatch):
        monkeypatch.setenv(SIMULATED_GPUS, "2")
        placement = choose(replicas=None, gpus=None, num_visible_gpus=8)
        assert placement == Placement("cpu", (0, 1), is_simulated=True)

    def test_simulated_gpus_are_limited_as_real_ones(self, monkeypatch):
        monkeypatch.setenv(SIMULATED_GPUS, "4")
        with pytest.raises(DeviceError, match=r"^Asked for GPUs \[0, 5\]; this machine has \[0, 1"):
            choose(replicas=None, gpus=[0, 5], num_visible_gpus=0)
        with pytest.raises(DeviceError, match=r"^Asked for replicas=5; this machine has 4 GPU"):
            choose(replicas=5, gpus=None, num_visible_gpus=0)

    @pytest.mark.parametrize("text", ["", "  ", "0"])
    def test_no_simulated_gpus(self, monkeypatch, text):
        monkeypatch.setenv(SIMULATED_GPUS, text)
        assert simulated_gpus() == 0
        assert not choose(replicas=2, gpus=None, num_visible_gpus=0).is_simulated

    @pytest.mark.parametrize(
        ("name", "text", "minimum"),
        [
            (REPLICAS, "0", 1),
            (REPLICAS, "-1", 1),
            (REPLICAS, "two", 1),
            (REPLICAS, "2.0", 1),
            (REPLICAS, "²", 1),
            (SIMULATED_GPUS, "-1", 0),
            (SIMULATED_GPUS, "all", 0),
        ],
    )
    def test_nonsense_is_refused(self, monkeypatch, name, text, minimum):
        monkeypatch.setenv(name, text)
        with pytest.raises(DeviceError) as caught:
            choose(replicas=None, gpus=None, num_visible_gpus=0)
        assert str(caught.value) == (
            f"Found {name}={text!r} in the environment. "
            f"Set it to a whole number of at least {minimum}, or unset it."
        )


class TestNumGpus:
    UUIDS = ("GPU-0000aa00-0000-0000-0000-000000000000", "GPU-0000aa01")

    def test_visible_devices(self, answer):
        """Four GPUs by the driver; all texts in one process, which reads the variable each time."""
        expected = {
            "0,1": 2,
            "0, 1": 2,
            " 2 , 3 ": 2,
            "0,1,2,3": 4,
            "": 0,
            "-1": 0,
            "0,-1,1": 1,
            "0,9,1": 1,
            "NoDevFiles": 0,
            ",".join(self.UUIDS): 2,
            "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6": 0,
            "MIG-GPU-8932f937/1/2,0": 2,
        }
        counts = "{text: os.environ.update(CUDA_VISIBLE_DEVICES=text) or num_gpus() for text in %r}"
        assert answer(counts % list(expected), STAND_IN_GPUS="4") == expected
        assert answer("num_gpus()", STAND_IN_GPUS="4") == 4

    def test_a_machine_without_the_driver_has_none(self, answer):
        env = {"STAND_IN_NO_DRIVER": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
        assert answer("num_gpus()", **env) == 0

    def test_simulated_gpus_count_instead(self, answer):
        assert answer("num_gpus()", STAND_IN_GPUS="2", UNISONO_SIMULATED_GPUS="3") == 3


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Placement("cpu", (0,)), "cpu"),
        (Placement("cpu", (0, 1)), "cpu 0, 1"),
        (Placement("gpu", (0,)), "gpu 0"),
        (Placement("gpu", (0, 2)), "gpu 0, 2"),
        (Placement("cpu", (0, 2), is_simulated=True), "gpu 0, 2 (simulated on the cpu)"),
    ],
)
def test_a_placement_reads_well(placement, text):
    assert str(placement) == text
