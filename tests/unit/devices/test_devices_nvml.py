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


def under(root) -> str:
    """Makes the driver's files be looked for below a folder."""
    path = f"__import__('pathlib').Path({str(root)!r})"
    return f"setattr(sys.modules['unisono.devices.driver'], '_ROOT', {path})"


def python_path(folder) -> str:
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


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
                "nearest_cores": [],
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

    @pytest.mark.parametrize("shown", ["NVML", "/proc"])
    def test_a_container_with_some_of_the_gpus(self, answer, tmp_path, shown):
        """The driver's folder may list all GPUs of the host; NVML, or device files, know better."""
        for i in range(8):
            (tmp_path / f"proc/driver/nvidia/gpus/{i}").mkdir(parents=True)
        (tmp_path / "dev").mkdir()
        for name in ("nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm"):
            (tmp_path / "dev" / name).touch()
        env = {"STAND_IN_NO_DRIVER": "1", "KERAS_BACKEND": "none"} if shown == "/proc" else {}
        asked = f"{under(tmp_path)} or num_gpus()"
        assert answer(asked, STAND_IN_GPUS="2", **env) == 2

    def test_wsl_keeps_its_library_elsewhere(self, plain_answer, driver_folder, tmp_path):
        (tmp_path / "usr/lib/wsl").mkdir(parents=True)
        (tmp_path / "usr/lib/wsl/lib").symlink_to(driver_folder)
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/dxg").touch()
        asked = f"{under(tmp_path)} or [num_gpus(), len(unisono.devices())]"
        assert plain_answer(asked, STAND_IN_GPUS="3") == [3, 3]

    def test_without_nvml_the_backend_counts(self, answer, tmp_path):
        """As on ROCm: the backend is asked in a process of its own, once."""
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/kfd").touch()
        package = tmp_path / "stand-in" / "torch"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise SystemExit(print('GPUs: 5'))")
        asked = f"{under(tmp_path)} or [num_gpus(), num_gpus(), list(list_devices().notes)]"
        env = {"STAND_IN_NO_DRIVER": "1", "KERAS_BACKEND": "torch"}
        counts = answer(asked, PYTHONPATH=python_path(package.parent), **env)
        assert counts[:2] == [5, 5]
        assert counts[2][1] == "Yet there is AMD's GPU driver (/dev/kfd): 5 visible GPU(s)."


class TestMig:
    PARTS = ("MIG-0000cc00-0000-0000-0000-000000001000", "MIG-0000cc01-0000-0000-0000-000000001001")

    def test_mig_devices_are_listed_instead_of_their_gpu(self, answer):
        records, notes, count = answer(
            "[unisono.devices(), list_devices().notes, num_gpus()]",
            STAND_IN_GPUS="2",
            STAND_IN_MIG="0:2",
        )
        assert [record["index"] for record in records] == [0, 0, 1]
        assert [record["uuid"] for record in records] == [*self.PARTS, uuid(1)]
        assert [record["total_bytes"] // GIB for record in records] == [4, 4, 16]
        assert [record["error"] for record in records] == [None] * 3
        assert count == 3
        assert "CUDA shows a process one MIG device only" in " ".join(notes)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (f"{PARTS[1]}, {PARTS[0]}", [1, 0, None]),
            ("MIG-0000cc01", [None, 0, None]),
            ("0", [0, None, None]),
            ("1", [None, None, 0]),
        ],
    )
    def test_by_their_names(self, answer, text, expected):
        env = {"STAND_IN_GPUS": "2", "STAND_IN_MIG": "0:2", "CUDA_VISIBLE_DEVICES": text}
        assert visible(answer(LIST, **env)) == expected

    def test_each_is_given_by_its_name(self, answer):
        chosen = answer("select(None)", STAND_IN_GPUS="1", STAND_IN_MIG="0:2")
        assert chosen["names"] == list(self.PARTS)
        assert [total // GIB for total in chosen["total_bytes"]] == [4, 4]


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
