"""`unisono doctor` on machines with GPUs: what it says of each, of links, and of training.

The driver is a stand-in below the real NVML binding, and the programs that need GPUs are answered
for (stand_in_doctor.py); tests/backend/test_doctor.py runs them on this machine's CPUs.
"""

import pytest

COMPUTED = {"stage": "compute", "device": "cpu", "difference": 0.0, "gflops": 50.0}


def shown(lines: list[dict]) -> list[tuple[str, str, str]]:
    return [(line["verdict"], line["sentence"], line["advice"]) for line in lines]


class TestGpus:
    def test_a_driver_that_does_not_answer(self, elsewhere, tmp_path):
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/nvidiactl").touch()
        env = {"ROOT": str(tmp_path), "KERAS_BACKEND": "none"}
        [line] = elsewhere("driver", STAND_IN_MISMATCH="1", **env)
        assert line["verdict"] == "broken"
        assert "version mismatch" in line["sentence"]
        assert "restart the machine" in line["advice"]

    def test_wsl_without_its_library(self, elsewhere, tmp_path):
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/dxg").touch()
        env = {"ROOT": str(tmp_path), "KERAS_BACKEND": "none", "STAND_IN_NO_DRIVER": "1"}
        [line] = elsewhere("driver", **env)
        assert line["verdict"] == "broken"
        assert "WSL2" in line["sentence"]
        assert "wsl --update" in line["advice"]

    def test_a_card_without_a_driver(self, elsewhere, tmp_path):
        card = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
        card.mkdir(parents=True)
        (card / "vendor").write_text("0x10de\n")
        (card / "class").write_text("0x030200\n")
        [line] = elsewhere("driver", ROOT=str(tmp_path), STAND_IN_NO_DRIVER="1")
        assert line["verdict"] == "broken"
        assert "1 NVIDIA GPU(s) are on the PCI bus" in line["sentence"]

    def test_a_container_is_told_what_it_was_granted(self, elsewhere, tmp_path):
        for i in range(8):
            (tmp_path / f"proc/driver/nvidia/gpus/{i}").mkdir(parents=True)
        (tmp_path / "dev").mkdir()
        [line] = elsewhere("driver", ROOT=str(tmp_path), STAND_IN_GPUS="2")
        assert line["verdict"] == "works"
        assert "2 of the host's 8 GPUs are granted here" in line["sentence"]

    def test_a_gpu_that_is_lost_and_one_that_others_use(self, elsewhere):
        lines = elsewhere("devices", STAND_IN_GPUS="3", STAND_IN_LOST="1", STAND_IN_FREE="16,16,2")
        assert [line["verdict"] for line in lines] == ["works", "broken", "slow"]
        assert "GPU is lost" in lines[1]["sentence"]
        assert "more than half is in use" in lines[2]["sentence"]

    @pytest.mark.parametrize(
        ("backend", "build", "sentence", "advice"),
        [
            (
                "torch",
                {},
                "The driver shows 2 GPU(s) and torch 2.13.0 sees none: it is a CPU build",
                "Install its GPU build: pip install --force-reinstall torch --index-url "
                "https://download.pytorch.org/whl/cu126",
            ),
            (
                "jax",
                {},
                "The driver shows 2 GPU(s) and JAX 2.13.0 sees none: it is a CPU build",
                'Install its GPU build: pip install "jax[cuda12]"',
            ),
            (
                "tensorflow",
                {"cuda": "12.5.1"},
                "The driver shows 2 GPU(s) and TensorFlow 2.13.0 sees none, though it was built "
                "for CUDA 12.5.1: its GPU libraries are missing or do not fit the driver",
                'Install them: pip install "tensorflow[and-cuda]"',
            ),
        ],
    )
    def test_a_backend_without_gpus(self, seen, elsewhere, backend, build, sentence, advice):
        answers = {"facts": [{"records": seen(0, **build)}]}
        env = {"KERAS_BACKEND": backend, "STAND_IN_GPUS": "2"}
        [line] = elsewhere("visible", answers=answers, **env)
        assert shown([line]) == [("broken", sentence, advice)]
        answers = {"facts": [{"records": seen(0, **build)}]}
        assert elsewhere("visible", answers=answers, CUDA_VISIBLE_DEVICES="", **env) == []

    def test_a_newer_driver_gets_the_newer_build(self, elsewhere):
        env = {"KERAS_BACKEND": "jax", "STAND_IN_GPUS": "1", "STAND_IN_CUDA": "13000"}
        [line] = elsewhere("visible", **env)
        assert 'pip install "jax[cuda13]"' in line["advice"]

    def test_a_backend_that_sees_some_gpus(self, seen, elsewhere):
        answers = {"facts": [{"records": seen(1, cuda="12.6")}]}
        [line] = elsewhere("visible", answers=answers, STAND_IN_GPUS="2")
        assert (line["verdict"], line["sentence"]) == ("broken", "it sees 1 of 2 GPUs")

    def test_a_build_for_a_newer_cuda_than_the_driver_supports(self, seen, elsewhere):
        answers = {"facts": [{"records": seen(2, cuda="13.0")}]}
        [line] = elsewhere("cuda", answers=answers, STAND_IN_GPUS="2", STAND_IN_CUDA="12080")
        assert line["verdict"] == "broken"
        assert line["sentence"].endswith("CUDA 13.0; the driver supports CUDA up to 12.8")
        assert "whl/cu126" in line["advice"]

    def test_a_gpu_that_computes_wrongly_one_that_fails_and_one_that_hangs(self, seen, elsewhere):
        records = [
            *seen(4, cuda="12.6")[:2],
            {"stage": "begin", "device": "gpu:0"},
            COMPUTED | {"device": "gpu:0", "difference": 4.0},
            {"stage": "begin", "device": "gpu:1"},
            {"stage": "compute", "device": "gpu:1", "error": "RuntimeError: no kernel image"},
            {"stage": "begin", "device": "gpu:2"},
        ]
        answers = {"facts": [{"records": records, "problem": "did not end within 60 s"}]}
        lines = elsewhere("compute", answers=answers, STAND_IN_GPUS="3")
        assert [line["name"] for line in lines] == [
            f"compute in torch on gpu:{i}" for i in range(3)
        ]
        assert {line["verdict"] for line in lines} == {"broken"}
        assert [line["sentence"] for line in lines] == [
            "a product is wrong by 4",
            "RuntimeError: no kernel image",
            "a product of two matrices did not end within 60 s",
        ]

    def test_a_gpu_that_is_slower_than_the_others(self, seen, elsewhere):
        records = seen(3, cuda="12.6")
        records[-1] = records[-1] | {"gflops": 10.0}
        [line] = elsewhere("compute", answers={"facts": [{"records": records}]}, STAND_IN_GPUS="3")
        assert line["verdict"] == "slow"
        assert line["sentence"].startswith("gpu:2 computes at less than half")

    def test_simulated_gpus_are_said_to_be_such(self, elsewhere):
        lines = elsewhere("driver", "devices", "visible", UNISONO_SIMULATED_GPUS="2")
        assert "broken" not in {line["verdict"] for line in lines}
        assert "UNISONO_SIMULATED_GPUS" in " ".join(line["sentence"] for line in lines)


class TestLinks:
    @pytest.fixture
    def links(self, seen, elsewhere):
        """The lines on links, where the program has begun these pairs and found this."""

        def run(*pairs: dict, problem: str | None = None, gpus: int = 2) -> list[dict]:
            records = [{"stage": "begin", "pair": found["pair"]} for found in pairs]
            records += [found for found in pairs if len(found) > 2]
            answers = {"facts": [{"records": seen(gpus, cuda="12.6")}]}
            answers["links"] = [{"records": records, "problem": problem}]
            return elsewhere("links", answers=answers, STAND_IN_GPUS=str(gpus))

        return run

    def pair(self, a: int, b: int, **found) -> dict:
        return {"stage": "pair", "pair": [a, b], **found}

    def test_one_gpu_has_no_link(self, links):
        line, _ = links(self.pair(0, 1, sum=3.0, gigabytes_per_s=1.0), gpus=1)
        assert line["verdict"] == "not checked"
        assert line["sentence"].startswith("there is one GPU")

    def test_right_and_fast(self, links):
        [line] = links(self.pair(0, 1, sum=3.0, gigabytes_per_s=20.0))
        assert line["sentence"] == "all-reduce right for 1 pair on 2 GPUs, 20 GB/s"

    def test_a_wrong_sum(self, links):
        [line] = links(self.pair(0, 1, sum=2.0, gigabytes_per_s=20.0))
        assert shown([line])[0][:2] == ("broken", "a sum of 1 and 2 is 2")

    def test_an_error(self, links):
        error = "DistBackendError: NCCL error: unhandled system error"
        [line] = links(self.pair(0, 1, error=error))
        assert shown([line])[0][:2] == ("broken", error)
        assert "NCCL_P2P_DISABLE=1" in line["advice"]

    def test_a_pair_that_hangs(self, links):
        pairs = [self.pair(0, 1, sum=3.0, gigabytes_per_s=20.0), self.pair(0, 2)]
        [line] = links(*pairs, problem="did not end within 60 s", gpus=3)
        assert line["name"] == "NCCL (torch) GPU 0 and 2"
        assert line["sentence"] == "the all-reduce did not end within 60 s"

    def test_a_slow_pair(self, links):
        pairs = [
            self.pair(0, 1, sum=3.0, gigabytes_per_s=40.0),
            self.pair(0, 2, sum=3.0, gigabytes_per_s=4.0),
            self.pair(1, 2, sum=3.0, gigabytes_per_s=40.0),
        ]
        [line] = links(*pairs, gpus=3)
        assert line["verdict"] == "slow"
        assert line["sentence"] == "all-reduce at 4 to 40 GB/s; slow between GPU 0 and 2"

    def test_processes_that_do_not_start(self, links):
        [line] = links(problem="failed with LaunchError: no port")
        assert shown([line])[0][:2] == (
            "broken",
            "processes of a run failed with LaunchError: no port",
        )


class TestTraining:
    @pytest.fixture
    def contract(self, elsewhere):
        def run(*calls: dict, **env: str) -> list[dict]:
            return elsewhere("contract", answers={"contract": list(calls)}, **env)

        return run

    def found(self, stage: str, difference: float) -> dict:
        return {"stage": stage, "difference": difference, "where": "weight 3"}

    def test_both_ways_are_exact(self, contract):
        lines = contract(
            {"records": [self.found("one device", 0.0), self.found("one process", 2e-7)]},
            {"records": [self.found("processes", 3e-7)]},
        )
        assert [line["verdict"] for line in lines] == ["works", "works"]
        assert lines[0]["sentence"].endswith(
            "compute what one device computes (2e-07; two runs of one are equal)"
        )

    def test_replicas_that_compute_something_else(self, contract):
        lines = contract(
            {"records": [self.found("one device", 1e-7), self.found("one process", 1e-3)]},
            {"records": [self.found("processes", float("nan"))]},
        )
        assert [line["verdict"] for line in lines] == ["broken", "broken"]
        assert "differ from one device by 1e-03 in weight 3" in lines[0]["sentence"]

    def test_a_device_that_differs_from_itself(self, contract):
        lines = contract(
            {"records": [self.found("one device", 1e-3), self.found("one process", 1e-3)]},
            {"records": [self.found("processes", 2e-3)]},
        )
        assert [line["verdict"] for line in lines] == ["works", "works"]
        assert "not deterministic" in lines[0]["advice"]

    def test_training_that_fails(self, contract):
        lines = contract({"problem": "failed with MemoryError: x"}, {"problem": "hung"})
        assert lines[0]["verdict"] == "broken"
        assert "failed with MemoryError: x" in lines[0]["sentence"]

    @pytest.fixture
    def speed(self, seen):
        """What 1, 2, 4, … GPUs answer that train at these rates."""

        def answers(*rates: float) -> dict:
            found = [
                {"stage": "speed", "replicas": 2**i, "samples_per_s": rate}
                for i, rate in enumerate(rates)
            ]
            facts = [{"records": seen(2 ** (len(rates) - 1), cuda="12.6")}]
            return {"facts": facts, "speed": [{"records": [record]} for record in found]}

        return answers

    def test_more_devices_are_faster(self, speed, elsewhere):
        [line] = elsewhere("speed", answers=speed(100, 190, 360), STAND_IN_GPUS="4")
        assert line["verdict"] == "works"
        assert line["sentence"] == "100 samples/s on 1 GPU; times 1.90 on 2, 3.60 on 4"

    def test_more_devices_are_not_faster(self, speed, elsewhere):
        [line] = elsewhere("speed", answers=speed(100, 105), STAND_IN_GPUS="2")
        assert line["verdict"] == "slow"
        assert line["advice"].startswith("Likely: ")

    def test_training_that_fails_on_two(self, speed, elsewhere):
        answers = speed(100, 190)
        answers["speed"][1] = {"problem": "was ended by SIGSEGV"}
        [line] = elsewhere("speed", answers=answers, STAND_IN_GPUS="2")
        assert (line["name"], line["verdict"]) == ("speed-up (torch), 2 replicas", "broken")
        assert line["sentence"] == "training was ended by SIGSEGV"
