"""What is listed on machines that are not here, through the real NVML binding."""

import contextlib
import os
import pwd
import subprocess

import pytest

GIB = 2**30
LIST = "told(unisono.devices)"
NOTES = "told(lambda: list_devices().notes)"


def uuid(index: int) -> str:
    start = 0xAA00 + index if index < 2 else 0xBB0000 + index
    return f"GPU-{start:08x}-0000-0000-0000-{index:012d}"


def visible(records: list[dict]) -> list[int | None]:
    return [record["visible_index"] for record in records]


@contextlib.contextmanager
def process_of_another_user():
    """A process that is not ours; this test's own, or init where we may not start one."""
    if os.getuid() != 0:
        yield 1
        return
    process = subprocess.Popen(["sleep", "60"], user=pwd.getpwnam("nobody").pw_uid)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


class TestHowMany:
    def test_none(self, answer):
        [cpu] = answer(LIST, STAND_IN_GPUS="0")
        assert (cpu["kind"], cpu["visible_index"], cpu["num_cores"] >= 1) == ("cpu", 0, True)
        assert 0 < cpu["free_bytes"] <= cpu["total_bytes"]
        assert answer(NOTES, STAND_IN_GPUS="0") == [
            "No GPU listed: the NVIDIA driver lists no GPU."
        ]

    def test_one(self, answer):
        assert answer(LIST, STAND_IN_GPUS="1") == [
            {
                "index": 0,
                "kind": "gpu",
                "name": "Stand-in A",
                "uuid": uuid(0),
                "total_bytes": 16 * GIB,
                "free_bytes": 16 * GIB,
                "utilisation": 0.0,
                "temperature_c": 40,
                "power_w": 100.0,
                "processes": [],
                "visible_index": 0,
                "num_cores": None,
                "is_simulated": False,
                "error": None,
            }
        ]
        assert answer(NOTES, STAND_IN_GPUS="1") == []

    def test_eight(self, answer):
        records = answer(LIST, STAND_IN_GPUS="8", STAND_IN_FREE="1,2,3,4,5,6,7,8")
        assert [record["uuid"] for record in records] == [uuid(i) for i in range(8)]
        assert [record["free_bytes"] // GIB for record in records] == [1, 2, 3, 4, 5, 6, 7, 8]
        assert [record["utilisation"] for record in records] == pytest.approx(
            [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, None]
        )
        assert visible(records) == list(range(8))


class TestTrouble:
    def test_a_lost_gpu_leaves_the_others(self, answer):
        records = answer(LIST, STAND_IN_GPUS="3", STAND_IN_LOST="1")
        assert [record["error"] for record in records] == [None, "GPU is lost", None]
        assert [record["total_bytes"] for record in records] == [16 * GIB, None, 16 * GIB]

    def test_a_gpu_that_fails_later_tells_what_it_can(self, answer):
        records = answer(LIST, STAND_IN_GPUS="3", STAND_IN_FAILING="2")
        assert [record["error"] for record in records] == [None, None, "Unknown Error"]
        assert records[2]["name"] == "Stand-in A"
        assert records[2]["total_bytes"] is None

    def test_a_driver_that_is_not_loaded(self, answer):
        [cpu] = answer(LIST, STAND_IN_GPUS="2", STAND_IN_NO_DRIVER="1")
        assert cpu["kind"] == "cpu"
        assert answer(NOTES, STAND_IN_NO_DRIVER="1") == [
            "No GPU listed: the NVIDIA driver does not answer: Driver Not Loaded."
        ]

    def test_a_binding_that_is_missing(self, answer):
        hidden = "sys.modules.update(pynvml=None) or list_devices().notes"
        assert answer(hidden, STAND_IN_GPUS="2") == [
            "No GPU listed: nvidia-ml-py, a dependency of unisono, is not installed: "
            "pip install nvidia-ml-py."
        ]

    def test_a_gpu_that_another_user_holds(self, answer):
        with process_of_another_user() as pid:
            records = answer(LIST, STAND_IN_GPUS="2", STAND_IN_HELD=f"1:{pid}")
        owner = "nobody" if os.getuid() == 0 else "root"
        assert records[0]["processes"] == []
        assert records[1]["processes"] == [{"pid": pid, "used_bytes": GIB, "user": owner}]

    def test_a_process_of_another_container(self, answer):
        records = answer(LIST, STAND_IN_GPUS="1", STAND_IN_HELD="0:4194999")
        assert records[0]["processes"] == [{"pid": 4194999, "used_bytes": GIB, "user": None}]


class TestVisibility:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("2,0", [1, None, 0, None]),
            (" 1 , 3 ", [None, 0, None, 1]),
            (uuid(3), [None, None, None, 0]),
            ("GPU-00bb0002", [None, None, 0, None]),
            (f"{uuid(1)},GPU-00bb0003", [None, 0, None, 1]),
            ("1,9,2", [None, 0, None, None]),
            ("1,-1,2", [None, 0, None, None]),
            ("1,GPU-ffff,2", [None, 0, None, None]),
            ("1,1", [None] * 4),
            (f"1,{uuid(1)}", [None] * 4),
            ("MIG-GPU-1/2/3,1", [None, 1, None, None]),
            ("GPU-0000aa", [None] * 4),
            ("-1", [None] * 4),
            ("", [None] * 4),
        ],
    )
    def test_as_cuda_reads_it(self, answer, text, expected):
        records = answer(LIST, STAND_IN_GPUS="4", CUDA_VISIBLE_DEVICES=text)
        gpus = [record for record in records if record["kind"] == "gpu"]
        assert visible(gpus) == expected
        # Where no GPU is left, the CPU is what there is.
        is_none_left = expected == [None] * 4
        assert (records[-1]["kind"] == "cpu") is is_none_left

    @pytest.mark.parametrize(
        ("text", "notes"),
        [
            ("0,1", ["CUDA_VISIBLE_DEVICES='0,1' hides no GPU."]),
            ("1", ["CUDA_VISIBLE_DEVICES='1' hides GPU 0."]),
            (
                "0,7",
                [
                    "CUDA_VISIBLE_DEVICES='0,7' hides GPU 1.",
                    "CUDA stops at its entry '7', which is no GPU of this machine.",
                ],
            ),
            (
                "0,0",
                [
                    "CUDA_VISIBLE_DEVICES='0,0' hides GPU 0, 1.",
                    "It names a device twice, and CUDA then sees none.",
                ],
            ),
            (
                "MIG-x",
                [
                    "CUDA_VISIBLE_DEVICES='MIG-x' hides GPU 0, 1.",
                    "MIG parts are passed through as named: MIG-x.",
                ],
            ),
        ],
    )
    def test_it_is_put_in_words(self, answer, text, notes):
        assert answer(NOTES, STAND_IN_GPUS="2", CUDA_VISIBLE_DEVICES=text) == notes

    def test_different_makes_are_numbered_by_speed(self, answer):
        mixed = {"STAND_IN_GPUS": "2", "STAND_IN_MIXED": "1"}
        [note] = answer(NOTES, **mixed)
        assert "Set CUDA_DEVICE_ORDER=PCI_BUS_ID" in note
        assert answer(NOTES, **mixed, CUDA_DEVICE_ORDER="PCI_BUS_ID") == []

    def test_simulated_gpus_stand_in_for_real_ones(self, answer):
        records = answer(LIST, STAND_IN_GPUS="8", UNISONO_SIMULATED_GPUS="3")
        assert [(r["kind"], r["is_simulated"], r["uuid"]) for r in records] == [
            ("gpu", True, None)
        ] * 3


def test_whether_cuda_has_started_is_asked_without_starting_it(answer, cuda_library):
    load = f"__import__('ctypes').CDLL({str(cuda_library)!r})"
    asked = f"[has_cuda_started(), {load} and has_cuda_started(), {load}.cuInit(0)]"
    assert answer(f"{asked} + [has_cuda_started()]") == [False, False, 0, True]
