"""Numbers that no machine can serve are refused at once, by every command that takes one."""

import os
import subprocess
import sys

import pytest

from unisono import configure
from unisono.devices import OVERSUBSCRIBE, REPLICAS, SIMULATED_GPUS, choose, cpu
from unisono.errors import DeviceError

HUGE = "99999999"
CORES = f"this machine has {cpu.num_cores()} core"


def unisono(*words: str, **changes: str) -> "subprocess.CompletedProcess[str]":
    env = {name: value for name, value in os.environ.items() if not name.startswith("UNISONO_")}
    command = [sys.executable, "-m", "unisono", *words]
    # Far more than it takes, and far less than so many processes would.
    return subprocess.run(
        command, env=env | changes, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (("run", "--replicas", HUGE, "x.py"), {}),
        (("run", "-np", HUGE, "x.py"), {}),
        (("run", "-H", f"localhost:{HUGE}", "x.py"), {}),
        (("run", "--replicas", "1", "--cpu-threads", HUGE, __file__), {}),
        (("run", "x.py"), {REPLICAS: HUGE}),
        (("run", "x.py"), {SIMULATED_GPUS: HUGE}),
        (("train", "digits", "--replicas", HUGE), {}),
        (("bench", "--replicas", f"1,{HUGE}"), {}),
        (("devices",), {REPLICAS: HUGE}),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_command_refuses_a_huge_number(words, changes, tmp_path):
    done = unisono(*words, **changes)
    if words != ("devices",):  # It tells of it beside the devices.
        assert done.returncode not in (0, -9), done.stdout
    told = done.stdout + done.stderr
    assert HUGE in told
    assert CORES in told
    assert "Traceback" not in told


def test_more_than_eight_per_core_are_refused_unless_it_is_allowed(monkeypatch):
    monkeypatch.setattr(sys.modules["unisono.devices.choice"], "num_cores", lambda: 3)
    for name in (REPLICAS, SIMULATED_GPUS, OVERSUBSCRIBE):
        monkeypatch.delenv(name, raising=False)
    assert choose(replicas=24, gpus=None, num_visible_gpus=0).num_replicas == 24
    expected = (
        "Asked for replicas=25; this machine has 3 cores for CPU replicas, and no GPU is used. Ask "
        "for at most 24 (8 per core), or set UNISONO_OVERSUBSCRIBE=1 to try more."
    )
    with pytest.raises(DeviceError) as caught:
        choose(replicas=25, gpus=None, num_visible_gpus=0)
    assert str(caught.value) == expected
    monkeypatch.setenv(OVERSUBSCRIBE, "1")
    assert choose(replicas=25, gpus=None, num_visible_gpus=0).num_replicas == 25


@pytest.mark.parametrize("gpus", [10**6, 10**15, range(10**15), [*range(17)]])
@pytest.mark.parametrize("found", [0, 4])
def test_more_gpus_than_any_machine_has(gpus, found):
    asked = f"gpus={gpus}" if isinstance(gpus, int) else "more than 16 GPUs"
    with pytest.raises(DeviceError, match=rf"{asked}; this machine has {found} GPU"):
        choose(replicas=None, gpus=gpus, num_visible_gpus=found)


@pytest.mark.parametrize(
    "asked", [{"cpu_threads": 10**6}, {"cpu_threads": 10**18}, {"gpus": range(10**15)}]
)
def test_huge_limits_of_a_process(asked):
    with pytest.raises(DeviceError, match=r"cpu_threads=10+; this machine|more than 1024 GPUs"):
        configure(**asked)


def test_one_remark_on_processes_that_share_cores(tmp_path):
    script = tmp_path / "x.py"
    script.write_text("import unisono, warnings; warnings.simplefilter('error')")
    count = cpu.num_cores() + 1
    done = unisono("run", "--replicas", str(count), "--show", "all", str(script))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("and take turns on them") == 1
    assert f"unisono: {count} processes share {cpu.num_cores()} core" in done.stderr
