"""The programs of `unisono doctor` on a real backend, and a defect that the contract finds."""

import json
import os
import subprocess
import sys

import pytest

BACKEND = os.environ.get("KERAS_BACKEND", "tensorflow")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
# The time of a busy machine: what did not fit into doctor's own would be missing here.
ONE_BACKEND = """
import functools, sys
import unisono.doctor
from unisono import cli
from unisono.doctor import examination
examination.is_installed = lambda name: name == {backend!r}
unisono.doctor.examine = functools.partial(examination.examine, budget_s=280)
sys.exit(cli.main(["doctor", "--json", *sys.argv[1:]]))
"""
# What every process of Python imports at its start: replicas then train with another rate.
DEFECT = """
import sys
if any("doctor.programs" in word for word in sys.orig_argv):
    import unisono
    right = unisono.parallel
    def wrong(model, **options):
        model = right(model, **options)
        model.optimizer.learning_rate = 0.02
        return model
    unisono.parallel = wrong
"""


def doctor(*only: str, **env: str) -> dict[str, dict]:
    words = [word for name in only for word in ("--only", name)]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("UNISONO_")}
    done = subprocess.run(
        [sys.executable, "-c", ONE_BACKEND.format(backend=BACKEND), *words],
        env=kept | {"KERAS_BACKEND": BACKEND} | env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout, done.stderr
    return {line["name"]: line for line in json.loads(done.stdout)["checks"]}


def test_what_works_here():
    found = doctor("backends", "compute", "links", "contract", "speed")
    verdicts = {name: line["verdict"] for name, line in found.items()}
    link, speed = f"gloo ({BACKEND})", f"speed-up ({BACKEND})"
    assert {verdicts.pop(name, None) for name in (link, speed)} <= {"works", "slow"}, found
    assert verdicts == {
        BACKEND: "works",
        f"compute in {BACKEND}": "works",
        f"contract ({BACKEND}, one process)": "works",
        f"contract ({BACKEND}, processes)": "works",
    }
    assert found[link]["data"]["gigabytes_per_s"]["0-1"] > 0
    assert set(found[f"speed-up ({BACKEND})"]["data"]["samples_per_s"]) >= {"1", "2"}


def test_replicas_that_train_otherwise_are_found(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(DEFECT)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = doctor("contract", PYTHONPATH=path)
    assert found[f"contract ({BACKEND}, one process)"]["verdict"] == "broken"
    assert found[f"contract ({BACKEND}, processes)"]["verdict"] == "broken"
