"""The command `unisono`: what it prints, and how it ends."""

import json
import os

import pytest

from unisono.cli import main
from unisono.devices import REPLICAS, SIMULATED_GPUS


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in (REPLICAS, SIMULATED_GPUS, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "unisono 0.1.0\n"


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["devices", "--nonsense"]])
def test_a_command_line_that_makes_no_sense_ends_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: unisono" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["top", "devices", "bench", "jobs"])
def test_an_unknown_option_shows_the_usage_of_its_command(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([command, "--bogus"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"usage: unisono {command} ")
    assert said.endswith(f"unisono {command}: error: unrecognized arguments: --bogus\n")


def test_an_error_is_one_line_and_ends_with_1(plain_python):
    done = plain_python(["-m", "unisono", "devices"], UNISONO_SIMULATED_GPUS="many")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "unisono: Found UNISONO_SIMULATED_GPUS='many' in the environment. "
        "Set it to a whole number of at least 0, or unset it.\n"
    )


def test_the_table(python_with_gpus):
    done = python_with_gpus(
        ["-m", "unisono", "devices"],
        KERAS_BACKEND="torch",
        CUDA_VISIBLE_DEVICES="0,3",
        STAND_IN_GPUS="4",
        STAND_IN_FREE="16,12,8,1",
        STAND_IN_HELD=f"3:{os.getpid()}",
        STAND_IN_LOST="2",
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[:7] == [
        "device name memory free busy used by",
        "gpu 0 Stand-in A 16 GiB of 16 GiB 0%",
        "hidden gpu 1 Stand-in A 12 GiB of 16 GiB 10%",
        "fails gpu 2 unknown ? ? GPU is lost",
        f"gpu 3 Stand-in A 1 GiB of 16 GiB 30% {_user()} ({os.getpid()})",
        "",
        "CUDA_VISIBLE_DEVICES='0,3' hides GPU 1, 2.",
    ]
    assert "NVIDIA driver 570.00" in lines
    assert lines[-2].startswith("Keras 3.")
    assert lines[-2].endswith("uses torch here")
    assert lines[-1] == "unisono.parallel(model): 2 replicas on gpu 0, 1"


def test_the_report_for_programs(python_with_gpus):
    done = python_with_gpus(
        ["-m", "unisono", "devices", "--json"],
        KERAS_BACKEND="jax",
        CUDA_VISIBLE_DEVICES="1",
        STAND_IN_GPUS="2",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [device["is_visible"] for device in report["devices"]] == [False, True]
    assert report["cuda_visible_devices"] == "1"
    assert report["keras_backend"] == "jax"
    assert set(report["backends"]) == {"jax", "tensorflow", "torch"}
    assert report["parallel"] == {
        "kind": "gpu",
        "indices": [0],
        "is_simulated": False,
        "num_processes": 1,
    }


def test_simulated_gpus_are_marked(capsys, monkeypatch):
    monkeypatch.setenv(SIMULATED_GPUS, "2")
    assert main(["devices"]) == 0
    said = capsys.readouterr().out
    assert "gpu 1   simulated on the cpu" in said
    assert "UNISONO_SIMULATED_GPUS: 2 CPU replica(s) answer as GPUs." in said
    assert "unisono.parallel(model): 2 replicas on gpu 0, 1 (simulated on the cpu)" in said


def test_what_parallel_would_raise_is_told(capsys, monkeypatch):
    monkeypatch.setenv(SIMULATED_GPUS, "2")
    monkeypatch.setenv(REPLICAS, "3")
    assert main(["devices", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["parallel"]["error"].startswith("Asked for UNISONO_REPLICAS=3; this machine has")


def test_a_reader_that_has_seen_enough(plain_python):
    script = (
        "import os, sys; from unisono.cli import main; "
        "reading, writing = os.pipe(); os.close(reading); os.dup2(writing, 1); "
        "sys.exit(main(['devices']))"
    )
    done = plain_python(["-c", script])
    assert (done.returncode, done.stderr) == (1, "")


def test_no_framework_is_imported(plain_python):
    script = (
        "import sys; from unisono.cli import main; main(['devices']); "
        "print({'keras', 'jax', 'tensorflow', 'torch', 'numpy'} & set(sys.modules))"
    )
    done = plain_python(["-c", script])
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def test_a_backend_that_is_not_installed_is_named(monkeypatch, capsys):
    from unisono.cli import devices as device_table

    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    monkeypatch.setattr(device_table, "keras_backend", lambda: "tensorflow")
    found = {"jax": "0.10.2", "tensorflow": None, "torch": None}
    monkeypatch.setattr(device_table, "backends", lambda: found)
    assert main(["devices"]) == 0
    printed = capsys.readouterr().out
    assert "uses tensorflow here, which is not installed: set KERAS_BACKEND=jax" in printed
