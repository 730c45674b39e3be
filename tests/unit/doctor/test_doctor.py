"""`unisono doctor`: every check in a machine on which it fails, and what it says then.

What one can break here is broken for real: packages, limits, ports, folders, Slurm's commands, the
driver below the real NVML binding. The programs that train are answered for (stand_in_doctor.py)
where they would take long, or need GPUs; tests/backend/test_doctor.py runs them.
"""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.doctor import CHECKS, examination, examine, machine
from unisono.doctor.results import Result, Verdict

SUPPORT = Path(__file__).parents[2] / "support"
BUILD = {"stage": "build", "version": "2.13.0", "cuda": None, "rocm": None, "cudnn": None}
BUILD |= {"nccl": None}
CPU = {"stage": "compute", "device": "cpu", "difference": 0.0, "gflops": 50.0}


def seen(num_gpus: int = 0, **build: str) -> list[dict]:
    """What the facts of a backend are that works."""
    names = [f"gpu:{i}" for i in range(num_gpus)] or ["cpu"]
    computed = [CPU | {"device": name} for name in names]
    return [BUILD | build, {"stage": "devices", "num_gpus": num_gpus}, *computed]


def lines_of(done: "subprocess.CompletedProcess[str]") -> list[dict]:
    assert done.stdout, done.stderr
    return json.loads(done.stdout)["checks"]


def shown(lines: list[dict]) -> list[tuple[str, str, str]]:
    return [(line["verdict"], line["sentence"], line["advice"]) for line in lines]


@pytest.fixture
def doctor(plain_python):
    """`doctor("ports", NAME=value)`: the lines of one check on this machine as it is."""

    def run(*only: str, **env: str) -> list[dict]:
        words = [word for name in only for word in ("--only", name)]
        done = plain_python(["-m", "unisono", "doctor", "--json", *words], **env)
        lines = lines_of(done)
        assert done.returncode == any(line["verdict"] == "broken" for line in lines)
        return lines

    return run


@pytest.fixture
def elsewhere(python_with_gpus, tmp_path):
    """The same on a machine with stand-in GPUs, whose training programs answer as given."""

    def run(*only: str, answers: dict | None = None, **env: str) -> list[dict]:
        path = tmp_path / "answers.json"
        path.write_text(json.dumps({"facts": [{"records": seen()}]} | (answers or {})))
        words = [word for name in only for word in ("--only", name)]
        command = [str(SUPPORT / "stand_in_doctor.py"), str(path), "--json", *words]
        done = python_with_gpus(command, **{"KERAS_BACKEND": "torch"} | env)
        lines = lines_of(done)
        assert done.returncode == any(line["verdict"] == "broken" for line in lines)
        return lines

    return run


def python_path(folder: Path) -> str:
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


class TestInstalled:
    @pytest.fixture
    def pretend(self, tmp_path):
        """Installs a package in name only; what PYTHONPATH is then."""

        def install(name: str, version: str) -> str:
            folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            (folder / "METADATA").write_text(text)
            return python_path(tmp_path)

        return install

    def test_a_version_that_is_too_new(self, doctor, pretend):
        [line] = doctor("versions", PYTHONPATH=pretend("torch", "99.0"), KERAS_BACKEND="torch")
        assert (line["name"], line["verdict"]) == ("torch 99.0", "broken")
        assert "newer than torch 2.13" in line["sentence"]
        assert line["advice"].startswith('pip install "torch>=2.13,<2.14"')

    def test_a_version_that_is_too_old(self, doctor, pretend):
        [line] = doctor("versions", PYTHONPATH=pretend("jax", "0.4.30"), KERAS_BACKEND="torch")
        assert (line["name"], line["verdict"]) == ("jax 0.4.30", "broken")
        assert "older than 0.10" in line["sentence"]

    @pytest.mark.parametrize(
        ("backend", "sentence"),
        [("numpy", "the backend 'numpy', which cannot train"), ("theano", "cannot train")],
    )
    def test_a_backend_that_cannot_train(self, doctor, backend, sentence):
        line = doctor("versions", KERAS_BACKEND=backend)[0]
        assert line["verdict"] == "broken"
        assert sentence in line["sentence"]
        assert line["advice"] == "Set KERAS_BACKEND to one of jax, tensorflow, torch."

    def test_two_packages_that_do_not_fit_together(self, doctor, pretend):
        lines = doctor("requirements", PYTHONPATH=pretend("jaxlib", "0.4.30"))
        (line,) = [line for line in lines if "jaxlib" in line["sentence"]]
        assert line["verdict"] == "broken"
        assert "wants jaxlib" in line["sentence"]
        assert "found 0.4.30" in line["sentence"]
        assert line["advice"].startswith('pip install "jaxlib')

    def test_a_plugin_of_another_version(self, doctor, pretend):
        lines = doctor("requirements", PYTHONPATH=pretend("jax-cuda12-plugin", "0.9.0"))
        (line,) = [line for line in lines if "jax-cuda12-plugin" in line["sentence"]]
        assert line["verdict"] == "broken"
        assert "found 0.9.0" in line["sentence"]

    def test_two_packages_in_one_place(self, doctor, pretend):
        pretend("tensorflow", "2.21.0")
        lines = doctor("requirements", PYTHONPATH=pretend("tensorflow-cpu", "2.21.0"))
        assert "tensorflow and tensorflow-cpu" in [line["name"] for line in lines]

    @pytest.mark.parametrize(
        ("source", "cause"),
        [
            ("raise ImportError('libcudart.so.12: cannot open shared object file')", "libcudart"),
            ("import os; os.abort()", "was ended by SIGABRT"),
            ("raise SystemExit(3)", "exit code 3"),
        ],
    )
    def test_a_backend_that_does_not_start(self, doctor, tmp_path, source, cause):
        for name in ("jax", "tensorflow", "torch"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text(source)
        env = {"PYTHONPATH": python_path(tmp_path), "KERAS_BACKEND": "torch"}
        lines = doctor("backends", "compute", "contract", **env)
        assert [line["name"] for line in lines[:3]] == ["torch", "jax", "tensorflow"]
        assert {line["verdict"] for line in lines[:3]} == {"broken"}
        assert cause in lines[0]["sentence"]
        assert lines[0]["advice"] == "Reinstall it: pip install --force-reinstall torch"
        assert {line["verdict"] for line in lines[3:]} == {"not checked"}

    def test_a_backend_that_hangs_is_given_up(self, plain_python, tmp_path):
        for name in ("jax", "tensorflow", "torch"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text("import time; time.sleep(600)")
        script = (
            "import sys; from unisono.doctor import examine, examination; "
            "examination.is_installed = lambda name: name == 'torch'; "
            "examination._FACTS_S = float(sys.argv[1]); "
            "[(_, line)] = examine(['backends'], budget_s=float(sys.argv[2])).results; "
            "print(line.verdict.value, line.sentence)"
        )
        env = {"PYTHONPATH": python_path(tmp_path), "KERAS_BACKEND": "torch"}
        done = plain_python(["-c", script, "2", "60"], **env)
        assert "broken the process in which it is imported did not end within 2 s" in done.stdout
        # In less time than it may take, a hang cannot be told from a slow machine.
        done = plain_python(["-c", script, "60", "7"], **env)
        assert "not checked no time was left" in done.stdout

    def test_no_backend_at_all(self, elsewhere):
        chosen, *_, last = elsewhere("versions", "backends", INSTALLED="none", STAND_IN_GPUS="0")
        assert (chosen["verdict"], last["verdict"]) == ("broken", "broken")
        assert chosen["sentence"] == "Keras is set to torch, which is not installed"
        assert chosen["advice"] == "pip install torch"
        assert last["sentence"] == "none of JAX, TensorFlow and torch is installed"


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
    def test_a_backend_without_gpus(self, elsewhere, backend, build, sentence, advice):
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

    def test_a_backend_that_sees_some_gpus(self, elsewhere):
        answers = {"facts": [{"records": seen(1, cuda="12.6")}]}
        [line] = elsewhere("visible", answers=answers, STAND_IN_GPUS="2")
        assert (line["verdict"], line["sentence"]) == ("broken", "it sees 1 of 2 GPUs")

    def test_a_build_for_a_newer_cuda_than_the_driver_supports(self, elsewhere):
        answers = {"facts": [{"records": seen(2, cuda="13.0")}]}
        [line] = elsewhere("cuda", answers=answers, STAND_IN_GPUS="2", STAND_IN_CUDA="12080")
        assert line["verdict"] == "broken"
        assert line["sentence"].endswith("CUDA 13.0; the driver supports CUDA up to 12.8")
        assert "whl/cu126" in line["advice"]

    def test_a_gpu_that_computes_wrongly_one_that_fails_and_one_that_hangs(self, elsewhere):
        records = [
            *seen(4, cuda="12.6")[:2],
            {"stage": "begin", "device": "gpu:0"},
            CPU | {"device": "gpu:0", "difference": 4.0},
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

    def test_a_gpu_that_is_slower_than_the_others(self, elsewhere):
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
    def links(self, elsewhere, *records: dict, problem: str | None = None, gpus: int = 2):
        records = [{"stage": "begin", "pair": record["pair"]} for record in records] + [
            record for record in records if len(record) > 2
        ]
        answers = {"facts": [{"records": seen(gpus, cuda="12.6")}]}
        answers["links"] = [{"records": records, "problem": problem}]
        return elsewhere("links", answers=answers, STAND_IN_GPUS=str(gpus))

    def pair(self, a: int, b: int, **found) -> dict:
        return {"stage": "pair", "pair": [a, b], **found}

    def test_one_gpu_has_no_link(self, elsewhere):
        line, _ = self.links(elsewhere, self.pair(0, 1, sum=3.0, gigabytes_per_s=1.0), gpus=1)
        assert line["verdict"] == "not checked"
        assert line["sentence"].startswith("there is one GPU")

    def test_right_and_fast(self, elsewhere):
        [line] = self.links(elsewhere, self.pair(0, 1, sum=3.0, gigabytes_per_s=20.0))
        assert line["sentence"] == "all-reduce right for 1 pair on 2 GPUs, 20 GB/s"

    def test_a_wrong_sum(self, elsewhere):
        [line] = self.links(elsewhere, self.pair(0, 1, sum=2.0, gigabytes_per_s=20.0))
        assert shown([line])[0][:2] == ("broken", "a sum of 1 and 2 is 2")

    def test_an_error(self, elsewhere):
        error = "DistBackendError: NCCL error: unhandled system error"
        [line] = self.links(elsewhere, self.pair(0, 1, error=error))
        assert shown([line])[0][:2] == ("broken", error)
        assert "NCCL_P2P_DISABLE=1" in line["advice"]

    def test_a_pair_that_hangs(self, elsewhere):
        pairs = [self.pair(0, 1, sum=3.0, gigabytes_per_s=20.0), self.pair(0, 2)]
        [line] = self.links(elsewhere, *pairs, problem="did not end within 60 s", gpus=3)
        assert line["name"] == "NCCL (torch) GPU 0 and 2"
        assert line["sentence"] == "the all-reduce did not end within 60 s"

    def test_a_slow_pair(self, elsewhere):
        pairs = [
            self.pair(0, 1, sum=3.0, gigabytes_per_s=40.0),
            self.pair(0, 2, sum=3.0, gigabytes_per_s=4.0),
            self.pair(1, 2, sum=3.0, gigabytes_per_s=40.0),
        ]
        [line] = self.links(elsewhere, *pairs, gpus=3)
        assert line["verdict"] == "slow"
        assert line["sentence"] == "all-reduce at 4 to 40 GB/s; slow between GPU 0 and 2"

    def test_processes_that_do_not_start(self, elsewhere):
        [line] = self.links(elsewhere, problem="failed with LaunchError: no port")
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

    def speed(self, *rates: float) -> dict:
        records = [
            {"stage": "speed", "replicas": 2**i, "samples_per_s": rate}
            for i, rate in enumerate(rates)
        ]
        facts = [{"records": seen(2 ** (len(rates) - 1), cuda="12.6")}]
        return {"facts": facts, "speed": [{"records": [record]} for record in records]}

    def test_more_devices_are_faster(self, elsewhere):
        [line] = elsewhere("speed", answers=self.speed(100, 190, 360), STAND_IN_GPUS="4")
        assert line["verdict"] == "works"
        assert line["sentence"] == "100 samples/s on 1 GPU; times 1.90 on 2, 3.60 on 4"

    def test_more_devices_are_not_faster(self, elsewhere):
        [line] = elsewhere("speed", answers=self.speed(100, 105), STAND_IN_GPUS="2")
        assert line["verdict"] == "slow"
        assert line["advice"].startswith("Likely: ")

    def test_training_that_fails_on_two(self, elsewhere):
        answers = self.speed(100, 190)
        answers["speed"][1] = {"problem": "was ended by SIGSEGV"}
        [line] = elsewhere("speed", answers=answers, STAND_IN_GPUS="2")
        assert (line["name"], line["verdict"]) == ("speed-up (torch), 2 replicas", "broken")
        assert line["sentence"] == "training was ended by SIGSEGV"

    def test_what_there_was_no_time_for(self):
        names = [check.name for check in CHECKS if check.is_long]
        report = examine(names, budget_s=0)
        assert {result.verdict for _, result in report.results} == {Verdict.NOT_CHECKED}
        assert [result.name for _, result in report.results] == names
        assert all(
            result.advice.startswith("unisono doctor --only") for _, result in report.results
        )


class TestMachine:
    def one(self, name: str) -> Result:
        return examine([name]).results[0][1]

    def test_busy_cores_and_little_memory(self, monkeypatch):
        monkeypatch.setattr(machine, "busy_fraction", lambda: 0.93)
        monkeypatch.setattr(machine, "memory_bytes", lambda: (16 << 30, 1 << 30))
        cores, memory = (result for _, result in examine(["cores"]).results)
        assert (cores.verdict, memory.verdict) == (Verdict.SLOW, Verdict.SLOW)
        assert "93% of the machine is busy" in cores.sentence

    @pytest.mark.namespaces
    @pytest.mark.skipif(os.getuid() != 0, reason="needs root")
    def test_ports_that_are_blocked(self):
        """In a new network namespace, loopback is down."""
        command = ["unshare", "--net", sys.executable, "-m", "unisono", "doctor", "--only", "ports"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 1, done.stdout
        assert "broken       ports on loopback" in done.stdout
        assert "ip link set lo up" in done.stdout

    def test_few_open_files(self):
        command = f"ulimit -n 300; exec {sys.executable} -m unisono doctor --only limits"
        done = subprocess.run(
            ["sh", "-c", command], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 1, done.stdout
        assert "broken       ulimit -n: a process may open 300 files" in done.stdout

    def test_other_limits(self, monkeypatch, tmp_path):
        limits = {machine.resource.RLIMIT_NOFILE: 4096, machine.resource.RLIMIT_NPROC: 100}
        monkeypatch.setattr(machine.resource, "getrlimit", lambda key: (limits.get(key, 65536), -1))
        monkeypatch.setattr(machine.os, "geteuid", lambda: 1000)
        monkeypatch.setattr(machine, "_PIDS", tmp_path / "pids.max")
        monkeypatch.setattr(machine, "_RDMA", tmp_path)
        (tmp_path / "pids.max").write_text("200\n")
        results = [result for _, result in examine(["limits"]).results]
        assert [result.name for result in results] == [
            "ulimit -u",
            "pids of the container",
            "ulimit -l",
        ]
        assert {result.verdict for result in results} == {Verdict.BROKEN}

    @pytest.mark.namespaces
    @pytest.mark.skipif(os.getuid() != 0, reason="needs root")
    def test_little_shared_memory(self):
        mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
        command = f"{mount} && exec {sys.executable} -m unisono doctor --only shm"
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", command],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 1, done.stdout + done.stderr
        assert "broken       /dev/shm: 64 MiB of 64 MiB is free" in done.stdout
        assert "--shm-size=8g" in done.stdout

    def test_no_shared_memory(self, monkeypatch, tmp_path):
        monkeypatch.setattr(machine, "_SHM", tmp_path / "missing")
        assert self.one("shm").verdict is Verdict.BROKEN

    def test_temporary_files_that_cannot_be_written(self, doctor, tmp_path):
        [line] = doctor("temp", TMPDIR=str(tmp_path / "missing"))
        assert line["verdict"] == "broken"
        assert "TMPDIR names a folder that cannot be written" in line["sentence"]

    @pytest.fixture
    def sinfo(self, tmp_path):
        """A stand-in for Slurm's command; what PATH is then."""

        def install(script: str) -> str:
            (tmp_path / "sinfo").write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / "sinfo").chmod(0o755)
            return os.pathsep.join([str(tmp_path), os.environ["PATH"]])

        return install

    def test_slurm_that_does_not_answer(self, doctor, sinfo):
        script = "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1"
        [line] = doctor("slurm", PATH=sinfo(script))
        assert line["verdict"] == "broken"
        assert "Unable to contact slurm controller" in line["sentence"]

    def test_slurm_that_knows_of_no_gpus(self, elsewhere, sinfo):
        path = sinfo("echo 'main*|4|64|infinite|(null)'")
        [line] = elsewhere("slurm", PATH=path, STAND_IN_GPUS="2")
        assert line["verdict"] == "broken"
        assert "Gres=gpu:N" in line["advice"]
        [line] = elsewhere("slurm", PATH=path, STAND_IN_GPUS="0")
        assert line["verdict"] == "works"

    def test_no_slurm(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        assert self.one("slurm").verdict is Verdict.NOT_CHECKED


class TestReport:
    def test_a_check_that_fails_itself_is_a_line(self, monkeypatch):
        def fail(found):
            raise ZeroDivisionError("oh")

        checks = (examination.Check("bad", "Machine", fail), *CHECKS)
        monkeypatch.setattr(examination, "CHECKS", checks)
        report = examine(["bad", "temp"])
        assert [result.verdict for _, result in report.results] == [Verdict.BROKEN, Verdict.WORKS]
        assert report.exit_code == 1

    def test_json_has_nobody_in_it(self, plain_python, tmp_path):
        home = tmp_path / "janes-home"
        home.mkdir()
        env = {"HOME": str(home), "LOGNAME": "jane_doe", "CUDA_HOME": f"{home}/cuda"}
        env |= {"XLA_FLAGS": "--xla_dump_to=/home/someone/dump", "UNISONO_SECRET": "tell-nobody"}
        done = plain_python(["-m", "unisono", "doctor", "--json", "--only", "temp"], **env)
        found = json.loads(done.stdout)
        assert found["environment"]["CUDA_HOME"] == "~/cuda"
        assert found["environment"]["XLA_FLAGS"] == "--xla_dump_to=~/dump"
        for word in ("janes-home", "jane_doe", "someone", "tell-nobody", os.uname().nodename):
            assert word not in done.stdout
        assert found["packages"]["keras"]
        assert found["devices"]

    def test_a_line_for_each_check_in_a_pipe(self, plain_python):
        done = plain_python(["-m", "unisono", "doctor", "--only", "temp", "--only", "limits"])
        lines = done.stdout.splitlines()
        assert lines[0] == "Machine"
        assert [line[:13] for line in lines[1:3]] == ["  works      "] * 2
        assert "\x1b" not in done.stdout
        assert lines[-1].startswith("All that was checked works")

    def test_colours_on_a_terminal(self):
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "unisono", "doctor", "--only", "temp"]
        env = {**os.environ, "TERM": "xterm-256color"}
        env.pop("NO_COLOR", None)
        process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)
        text = b""
        try:
            while chunk := os.read(ours, 4096):
                text += chunk
        except OSError:  # The terminal is gone with its last user.
            pass
        assert process.wait(60) == 0
        os.close(ours)
        assert b"\x1b[32mworks" in text

    def test_an_unknown_name_ends_with_2(self, plain_python):
        done = plain_python(["-m", "unisono", "doctor", "--only", "nonsense"])
        assert done.returncode == 2
        assert "choose among" in done.stderr

    def test_no_framework_is_loaded_here(self, plain_python):
        script = (
            "import sys; from unisono.doctor import examine; "
            "examine(['machine', 'versions', 'requirements', 'driver', 'devices']); "
            "print([n for n in ('keras', 'jax', 'tensorflow', 'torch') if n in sys.modules])"
        )
        done = plain_python(["-c", script])
        assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_every_check_is_documented():
    page = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text(encoding="utf-8")
    for check in CHECKS:
        assert f"| `{check.name}` |" in page, check.name


def test_the_example_of_the_page(plain_python):
    """What it shows of this machine's quick checks is printed, in this order."""
    page = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text(encoding="utf-8")
    example = page.split("```text\n")[1].split("```")[0]
    quick = ("versions", "requirements", "driver", "cores", "limits", "shm", "temp")
    words = [word for name in quick for word in ("--only", name)]
    done = plain_python(["-m", "unisono", "doctor", *words])
    assert named(done.stdout)
    assert [line for line in named(example) if line in named(done.stdout)] == named(done.stdout)
    closing = "All that was checked works"
    assert done.stdout.splitlines()[-1].startswith(closing)
    assert example.splitlines()[-1].startswith(closing)


def named(text: str) -> list[str]:
    """The groups and the names of lines, without verdicts and what is particular to a machine."""
    lines = (line for line in text.splitlines()[:-1] if line.strip())
    return [line[15:].partition(":")[0] if line.startswith("  ") else line for line in lines]
