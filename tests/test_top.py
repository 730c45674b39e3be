"""`unisono top`: its view and verdicts, and the command in a real terminal."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from test_events import progress, writer
from unisono.devices import Device
from unisono.events import EventFile, RankEvents
from unisono.monitor.readings import Readings, Usage
from unisono.monitor.verdict import verdict_on_devices, verdict_on_run
from unisono.monitor.view import bar, lines

GIB = 1 << 30
GPU = Device(
    0, "gpu", "A100", total_bytes=16 * GIB, free_bytes=12 * GIB, utilisation=0.5,
    temperature_c=60, power_w=210.0, visible_index=0,
)  # fmt: skip


def ranks(*changes, **more) -> list[RankEvents]:
    found = []
    for rank, change in enumerate(changes):
        is_alive = change.get("is_alive", True)
        known = {name: value for name, value in change.items() if name != "is_alive"}
        last = progress(**{"at": 100.0, **known})
        found.append(RankEvents(writer(rank=rank, world_size=len(changes), **more), last, is_alive))
    return found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([{}, {}], "all 2 replicas here work evenly"),
        ([{}, {"is_alive": False}], "rank 1 is gone"),
        ([{"is_alive": False, "is_over": True}] * 2, "has ended"),
        (
            [{"is_alive": False, "is_over": True}, {"is_alive": False}],
            "has ended before its training: rank 1 is gone",
        ),
        (
            [
                {"is_alive": False, "is_over": True, "failed_with": "PeerLostError", "at": 100.5},
                {"is_alive": False, "is_over": True, "failed_with": "ValueError"},
            ],
            "was stopped by ValueError (rank 1)",
        ),
        ([{}, {}, {"at": 80.0}], "rank 2 is silent for 10 s and more"),
        ([{}, {"steps_per_s": 0.0}], "rank 1 is idle: no step for some time"),
        ([{}, {}, {"steps_per_s": 8.0}], "rank 2 is slower than the others by 15% and more"),
        ([{"input_wait": 0.6}, {"input_wait": 0.5}], "waits for its input 55% of the time"),
    ],
)
def test_a_run_is_judged(changes, said):
    assert verdict_on_run(ranks(*changes), now=101.0) == said


@pytest.mark.parametrize(
    ("loads", "said"),
    [
        ([], ""),
        ([0.9, 0.8], "all 2 GPUs work"),
        ([0.9, 0.0], "GPU 1 is idle, others work"),
        ([0.0, 0.0], "all GPUs are idle"),
        ([None], ""),
    ],
)
def test_gpus_are_judged(loads, said):
    gpus = [dataclasses.replace(GPU, index=i, utilisation=load) for i, load in enumerate(loads)]
    assert verdict_on_devices(gpus) == said


def test_a_gpu_that_vanished_is_named():
    lost = dataclasses.replace(GPU, index=1, error="GPU is lost")
    assert verdict_on_devices([GPU, lost]) == "GPU 1 is not answering"
    assert any("does not answer: GPU is lost" in line for line in lines(Readings((lost,)), {}, 80))


def test_the_view():
    usage = Usage(os.getpid(), "python train.py", "ada", 1.5, 2 * GIB)
    readings = Readings((GPU,), cores=(0.25, 1.0), usages=(usage,))
    found = lines(readings, {"run": ranks({}, {})}, 100, now=101.0)
    assert found == [
        "Devices: all 1 GPUs work",
        "gpu 0  ██████        50%  4 GiB of 16 GiB  60 °C  210 W  A100",
        "  0 ██        25%    1 ████████ 100%",
        "",
        "train.py: all 2 replicas here work evenly",
        "  jax, 2 replica(s), epoch 1 of 3, step 7 of 10, 640 samples/s in all, loss 0.5",
        "  rank 0  cpu 0  320 samples/s a replica  100.0 ms a step  input 10%  1.5 cores, 2 GiB",
        "  rank 1  cpu 0  320 samples/s a replica  100.0 ms a step  input 10%  1.5 cores, 2 GiB",
    ]


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("height", [3, 10, 100])
def test_the_view_fits_any_window(width, height):
    readings = Readings((GPU,) * 8, notes=("a note " * 30,), cores=(0.5,) * 64)
    found = lines(readings, {"run": ranks(*({} for _ in range(8)))}, width, height, now=101.0)
    assert len(found) <= height
    assert max(map(len, found)) <= width


def test_the_verdict_has_room_in_a_narrow_window():
    long = ranks({}, {}, program="/a/long/way/to/train.py --with many --other words")
    ended = ranks({"is_alive": False, "is_over": True}, program="old.py")
    found = lines(Readings(()), {"ended": ended, "run": long}, 48, now=101.0)
    assert found[1].startswith("train.py --")
    assert found[1].endswith("…: all 2 replicas here work evenly")
    assert found[5] == "old.py: has ended"


def test_bars():
    assert bar(0.0, 4) == "    "
    assert bar(1.7, 4) == "████"
    assert bar(None, 4) == "?   "
    assert bar(0.6, 4) == "██▍ "


def top(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unisono", "top", *words]
    return subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, timeout=60, check=True
    )


def test_the_command_as_text_and_json(tmp_path):
    EventFile(tmp_path, writer(world_size=1)).write(progress(at=time.time()))
    text = top("--once", UNISONO_RUNS=str(tmp_path)).stdout
    assert "train.py: all 1 replica here work evenly" in text
    told = json.loads(top("--json", UNISONO_RUNS=str(tmp_path)).stdout)
    assert told["runs"][0]["verdict"] == "all 1 replica here work evenly"
    assert told["runs"][0]["ranks"][0]["last"]["loss"] == 0.5
    assert told["devices"]["cores"]


def test_lines_are_whole_in_a_pipe_and_no_run_is_said(tmp_path):
    EventFile(tmp_path, writer(world_size=1, program="x" * 300)).write(progress(at=time.time()))
    assert "x" * 300 in top("--once", UNISONO_RUNS=str(tmp_path)).stdout
    assert "No run of unisono" in top("--once", UNISONO_RUNS=str(tmp_path / "none")).stdout


@pytest.mark.parametrize("count", [4, 8])
def test_the_gpus_of_a_stand_in_driver(driver_folder, count):
    env = {"LD_LIBRARY_PATH": str(driver_folder), "STAND_IN_GPUS": str(count), "STAND_IN_LOST": "2"}
    told = json.loads(top("--json", UNISONO_RUNS="", **env).stdout)["devices"]
    gpus = [device for device in told["devices"] if device["kind"] == "gpu"]
    assert len(gpus) == count
    assert (gpus[1]["temperature_c"], gpus[1]["power_w"]) == (41, 110.5)
    assert told["verdict"] == "GPU 2 is not answering"


@pytest.mark.parametrize(("columns", "rows", "count"), [(100, 30, 0), (120, 40, 8), (40, 16, 4)])
def test_in_a_real_terminal(tmp_path, driver_folder, columns, rows, count):
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    EventFile(tmp_path, writer(world_size=1)).write(progress(at=time.time() + 3600))
    socket = str(tmp_path / "tmux")

    def tmux(*words: str) -> str:
        done = subprocess.run(["tmux", "-S", socket, *words], capture_output=True, text=True)
        return done.stdout

    command = f"{sys.executable} -m unisono top; echo it has ended; sleep 60"
    size = ["-x", str(columns), "-y", str(rows)]
    env = os.environ | {
        "UNISONO_RUNS": str(tmp_path),
        "LD_LIBRARY_PATH": str(driver_folder),
        "STAND_IN_GPUS": str(count),
        "STAND_IN_LOST": "2",
        "STAND_IN_LOST_IF": str(tmp_path / "vanished"),
    }
    words = ["tmux", "-S", socket, "-f", "/dev/null", "new-session", "-d", *size, command]
    subprocess.run(words, env=env, check=True)
    try:
        shown = wait_for(lambda: tmux("capture-pane", "-p"), "train.py:")
        assert max(map(len, shown.splitlines())) <= columns
        assert ("gpu 0" in shown, "gpu 2" in shown) == (count > 0, count > 0)
        assert "not answering" not in shown
        (tmp_path / "vanished").touch()
        if count:
            shown = wait_for(lambda: tmux("capture-pane", "-p"), "GPU 2 is not answering")
            assert "gpu 3" in shown
        tmux("send-keys", "C-c")
        assert "train.py" not in wait_for(lambda: tmux("capture-pane", "-p"), "it has ended")
    finally:
        tmux("kill-server")


def wait_for(look, text: str, seconds: float = 20) -> str:
    deadline = time.monotonic() + seconds
    while text not in (shown := look()):
        assert time.monotonic() < deadline, shown
        time.sleep(0.1)
    return shown


def test_it_costs_little(tmp_path):
    """Of a core's time, over some seconds, in a terminal of its own."""
    code = "import unisono.top as t, time, sys\nfor _ in range(6): t.look(); time.sleep(0.5)"
    EventFile(tmp_path, writer()).write(progress())
    script = f"{code}\nprint(time.process_time())"
    env = os.environ | {"UNISONO_RUNS": str(tmp_path)}
    base = subprocess.run(
        [sys.executable, "-c", "import unisono.top, time; print(time.process_time())"],
        env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) - float(base.stdout) < 1.0
