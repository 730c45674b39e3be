"""`unisono doctor`: packages, limits, ports, folders and Slurm that are broken for real, and the
report. Machines with GPUs are in test_doctor_gpus.py.
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
            "examination.machine.busy_fraction = lambda: float(sys.argv[3]); "
            "examination.is_installed = lambda name: name == 'torch'; "
            "examination._FACTS_S = float(sys.argv[1]); "
            "[(_, line)] = examine(['backends'], budget_s=float(sys.argv[2])).results; "
            "print(line.verdict.value, line.sentence)"
        )
        env = {"PYTHONPATH": python_path(tmp_path), "KERAS_BACKEND": "torch"}
        done = plain_python(["-c", script, "2", "60", "0.1"], **env)
        assert "broken the process in which it is imported did not end within 2 s" in done.stdout
        # In less time than it may take, or beside other programs, a hang cannot be told from that.
        for times in (["60", "7", "0.1"], ["2", "60", "0.9"]):
            done = plain_python(["-c", script, *times], **env)
            assert "not checked the process in which it is imported did not end" in done.stdout

    def test_no_backend_at_all(self, elsewhere):
        chosen, *_, last = elsewhere("versions", "backends", INSTALLED="none", STAND_IN_GPUS="0")
        assert (chosen["verdict"], last["verdict"]) == ("broken", "broken")
        assert chosen["sentence"] == "Keras is set to torch, which is not installed"
        assert chosen["advice"] == "pip install torch"
        assert last["sentence"] == "none of JAX, TensorFlow and torch is installed"


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
    def test_what_there_was_no_time_for(self):
        names = [check.name for check in CHECKS if check.is_long]
        report = examine(names, budget_s=0)
        assert {result.verdict for _, result in report.results} == {Verdict.NOT_CHECKED}
        assert [result.name for _, result in report.results] == names
        assert all(
            result.advice.startswith("unisono doctor --only") for _, result in report.results
        )

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
