"""`unisono doctor` on this machine, and on machines that are not here."""

import json
import subprocess
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[2] / "support"
BUILD = {"stage": "build", "version": "2.13.0", "cuda": None, "rocm": None, "cudnn": None}
BUILD |= {"nccl": None}
COMPUTED = {"stage": "compute", "device": "cpu", "difference": 0.0, "gflops": 50.0}


def facts_of(num_gpus: int = 0, **build: str) -> list[dict]:
    """What the facts of a backend are that works."""
    names = [f"gpu:{i}" for i in range(num_gpus)] or ["cpu"]
    computed = [COMPUTED | {"device": name} for name in names]
    return [BUILD | build, {"stage": "devices", "num_gpus": num_gpus}, *computed]


def lines_of(done: "subprocess.CompletedProcess[str]") -> list[dict]:
    assert done.stdout, done.stderr
    return json.loads(done.stdout)["checks"]


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
        path.write_text(json.dumps({"facts": [{"records": facts_of()}]} | (answers or {})))
        words = [word for name in only for word in ("--only", name)]
        command = [str(SUPPORT / "stand_in_doctor.py"), str(path), "--json", *words]
        done = python_with_gpus(command, **{"KERAS_BACKEND": "torch"} | env)
        lines = lines_of(done)
        assert done.returncode == any(line["verdict"] == "broken" for line in lines)
        return lines

    return run


@pytest.fixture
def seen():
    """`seen(2, cuda="12.6")`: what a backend that works says of itself."""
    return facts_of
