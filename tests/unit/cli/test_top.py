"""`unisono top`: its view and verdicts, and the command in a real terminal."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from event_records import progress, writer

from unisono.devices import Device
from unisono.monitor.events import EventFile, RankEvents, ticks_of
from unisono.monitor.readings import Readings, Usage
from unisono.monitor.verdict import verdict_on_devices, verdict_on_run
from unisono.monitor.view import bar, lines

GIB = 1 << 30
BEGAN = time.strftime("%H:%M:%S", time.localtime(1.0))
DAY = time.strftime("%Y-%m-%d %H:%M", time.localtime(1.0))
GPU = Device(
    0, "gpu", "A100", total_bytes=16 * GIB, free_bytes=12 * GIB, utilisation=0.5,
    temperature_c=60, power_w=210.0, visible_index=0,
)  # fmt: skip


def ranks(*changes, **more) -> list[RankEvents]:
    found = []
    for rank, change in enumerate(changes):
        known = {"at": 100.0, **change}
        is_alive = known.pop("is_alive", True)
        is_stopped = known.pop("is_stopped", False)
        mine = writer(**{"rank": rank, "world_size": len(changes), **more})
        found.append(RankEvents(mine, progress(**known), is_alive, is_stopped))
    return found


ENDED = {"is_alive": False, "is_over": True}
LOST = ENDED | {"failed_with": "PeerLostError"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([{}], "1 replica works"),
        ([{}, {}], "both replicas work evenly"),
        ([{}] * 4, "all 4 replicas work evenly"),
        ([{}, {"is_alive": False}], "rank 1 is gone without a word: killed?"),
        ([ENDED] * 2, "has ended"),
        ([{}, ENDED], "rank 1 is through, the others still work"),
        ([ENDED, {"is_alive": False}], "rank 1 is gone without a word: killed?"),
        ([{}, {"is_stopped": True}], "rank 1 is stopped (SIGSTOP, Ctrl-Z or a debugger)"),
        ([{}, {}, {"at": 80.0}], "rank 2 is silent for 10 s and more"),
        ([{}, {}, {"at": 96.0}], "all 3 replicas work evenly"),
        ([{"steps_per_s": 0.0}, {"at": 97.0}], "rank 1 is silent for 3 s and more"),
        ([{"steps_per_s": 0.0}, {"at": 99.0}], "has made no step for some time"),
        ([{"steps_per_s": 0.0}] * 2, "has made no step for some time"),
        ([{"steps_per_s": 0.0, "step": 0}] * 2, "has made no step yet"),
        ([{}, {"steps_per_s": 0.0}], "rank 1 is idle: no step for some time"),
        ([{}, {}, {"steps_per_s": 8.0}], "rank 2 is slower than the others by 15% and more"),
        ([{"input_wait": 0.6}, {"input_wait": 0.5}], "waits for its input 55% of the time"),
        (
            [{"core_wait": 0.1, "peer_wait": 0.6}, {"core_wait": 0.5, "peer_wait": 0.0}],
            "cores are short: other programs take 50% of the processor time that rank 1 needs",
        ),
        (
            [{"core_wait": 0.4}, {"core_wait": 0.5}],
            "cores are short: other programs take 50% of the processor time that ranks 0, 1 need",
        ),
        (
            [{"core_wait": 0.1, "peer_wait": 0.7}, {"core_wait": 0.0, "peer_wait": 0.6}],
            "communication dominates: for 60% of the time all processes wait for each other",
        ),
        ([{"peer_wait": 0.9}, {"peer_wait": 0.1}], "both replicas work evenly"),
    ],
)
def test_a_run_is_judged(changes, said):
    assert verdict_on_run(ranks(*changes), now=101.0) == said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            [LOST | {"at": 100.5}, ENDED | {"failed_with": "ValueError"}],
            "was stopped by ValueError (rank 1)",
        ),
        (
            [LOST, {"is_alive": False, "at": 99.5}],
            "rank 1 is gone without a word: killed? Hence PeerLostError at rank 0",
        ),
        (
            [LOST, {"is_alive": False, "at": 99.5}, LOST],
            "rank 1 is gone without a word: killed? Hence PeerLostError at ranks 0, 2",
        ),
        # The launcher has ended rank 0, some time after rank 1 was killed.
        (
            [{"is_alive": False, "at": 100.5}, {"is_alive": False, "at": 98.0}],
            "rank 1 is gone without a word: killed?",
        ),
        # The launcher has ended rank 0, because of rank 1's error.
        (
            [{"is_alive": False, "at": 99.5}, ENDED | {"failed_with": "ValueError"}],
            "was stopped by ValueError (rank 1)",
        ),
        ([LOST, LOST], "was stopped by PeerLostError (rank 0)"),
    ],
)
def test_the_cause_is_named_and_not_its_victims(changes, said):
    assert verdict_on_run(ranks(*changes), now=101.0) == said


def test_replicas_of_other_machines_are_not_judged():
    said = verdict_on_run(ranks({}, {}, world_size=4), now=101.0)
    assert said == "both replicas here work evenly (2 more elsewhere)"
    said = verdict_on_run(ranks({}, world_size=2), now=101.0)
    assert said == "1 replica here works (1 more elsewhere)"


@pytest.mark.parametrize(
    ("loads", "said"),
    [
        ([], ""),
        ([0.9], "1 GPU works"),
        ([0.9, 0.8], "both GPUs work"),
        ([0.9] * 4, "all 4 GPUs work"),
        ([0.0], "the GPU is idle"),
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
    found = lines(readings, {"run": ranks({}, {}, pid=os.getpid())}, 100, now=101.0)
    assert found == [
        "Devices: 1 GPU works",
        "gpu 0  ██████        50%  4 GiB of 16 GiB  60 °C  210 W  A100",
        "  0 ██        25%    1 ████████ 100%",
        "",
        f"train.py (pid {os.getpid()}, since {BEGAN}): both replicas work evenly",
        "  jax, 2 replicas on cpu 0, epoch 1 of 3, step 7 of 10, 640 samples/s in all, loss 0.5",
        "  rank 0  320 samples/s a replica  100.0 ms a step  input 10%  1.5 cores, 2 GiB",
        "  rank 1  320 samples/s a replica  100.0 ms a step  input 10%  1.5 cores, 2 GiB",
    ]


def shown(found: list[RankEvents], width: int = 100, now: float = 101.0) -> list[str]:
    """The lines about a run."""
    return lines(Readings(()), {"run": found}, width, now=now)[1:]


def test_figures_that_are_no_news_are_not_shown():
    held = ranks({"steps_per_s": 0.0, "samples_per_s": 0.0}, {"at": 96.0, "is_stopped": True})
    assert shown(held)[1:] == [
        "  jax, 2 replicas on cpu 0, epoch 1 of 3, step 7 of 10, 0 samples/s in all, loss 0.5",
        "  rank 0  waits for rank 1",
        "  rank 1  stopped",
    ]
    assert shown(ranks({}, {}), now=107.0)[1:] == [
        "  jax, 2 replicas on cpu 0, epoch 1 of 3, step 7 of 10, loss 0.5",
        "  rank 0  silent for 7 s",
        "  rank 1  silent for 7 s",
    ]
    assert shown(ranks({"steps_per_s": 0.0}, {"steps_per_s": 0.0}))[2:] == [
        "  rank 0  no step for some time",
        "  rank 1  no step for some time",
    ]


def test_how_each_process_ended_is_shown():
    found = shown(ranks(LOST, {"is_alive": False}, ENDED))
    assert [line.strip() for line in found[-3:]] == [
        "rank 0  failed with PeerLostError",
        "rank 1  gone without a word",
        "rank 2  ended",
    ]


def test_runs_of_one_script_can_be_told_apart():
    first, second = (ranks({}, pid=pid, began=began) for pid, began in ((11, 1.0), (12, 61.0)))
    found = lines(Readings(()), {"a": first, "b": second}, 100, now=101.0)
    began = time.strftime("%H:%M:%S", time.localtime(61.0))
    assert found[1] == f"train.py (pid 11, since {BEGAN}): 1 replica works"
    assert found[4] == f"train.py (pid 12, since {began}): 1 replica works"
    later = shown(ranks({"at": 3e5}), now=3e5)
    assert later[0] == f"train.py (pid {os.getpid()}, since {DAY}): 1 replica works"


def test_devices_that_differ_are_told_of_each_process():
    found = ranks({}, {})
    found[1] = dataclasses.replace(found[1], writer=writer(rank=1, devices="gpu 3"))
    assert shown(found)[1].startswith("  jax, 2 replicas, epoch 1")
    assert [line.rpartition("  ")[2] for line in shown(found)[2:]] == ["cpu 0", "gpu 3"]


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("height", [3, 10, 100])
def test_the_view_fits_any_window(width, height):
    readings = Readings((GPU,) * 8, notes=("a note " * 30,), cores=(0.5,) * 64)
    found = lines(readings, {"run": ranks(*({} for _ in range(8)))}, width, height, now=101.0)
    assert len(found) <= height
    assert max(map(len, found)) <= width


def test_the_verdict_has_room_in_a_narrow_window():
    devices = "a cpu in each of 2 processes"
    long = "/a/long/way/to/train.py --with many --other words"
    found = ranks({}, {"is_stopped": True}, program=long, devices=devices, pid=7)
    assert shown(found, 44) == [
        f"train.py --with ma… (pid 7, since {BEGAN}):",
        "  rank 1 is stopped (SIGSTOP, Ctrl-Z or a",
        "    debugger)",
        "  jax, 2 replicas on a cpu in each of 2",
        "    processes, epoch 1 of 3, step 7 of 10,",
        "    640 samples/s in all, loss 0.5",
        "  rank 0  320 samples/s  100.0 ms  input 10%",
        "  rank 1  stopped",
    ]


def test_runs_that_train_come_first():
    runs = {"ended": ranks(ENDED, program="old.py"), "run": ranks({})}
    found = lines(Readings(()), runs, 80, now=101.0)
    assert [line.partition(" ")[0] for line in found if " (pid" in line] == ["train.py", "old.py"]


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
    assert f"train.py (pid {os.getpid()}, since {DAY}): 1 replica works" in text
    told = json.loads(top("--json", UNISONO_RUNS=str(tmp_path)).stdout)
    assert told["runs"][0]["verdict"] == "1 replica works"
    assert told["runs"][0]["ranks"][0]["last"]["loss"] == 0.5
    assert told["devices"]["cores"]


def test_a_stopped_process_is_named_at_once(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as held:
        try:
            for rank, pid in enumerate([os.getpid(), held.pid]):
                mine = writer(rank=rank, pid=pid, started=ticks_of(pid))
                EventFile(tmp_path, mine).write(progress(at=time.time()))
            os.kill(held.pid, signal.SIGSTOP)
            (told,) = json.loads(top("--json", UNISONO_RUNS=str(tmp_path)).stdout)["runs"]
        finally:
            held.kill()
    assert told["verdict"] == "rank 1 is stopped (SIGSTOP, Ctrl-Z or a debugger)"
    assert [rank["is_stopped"] for rank in told["ranks"]] == [False, True]


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
        shown = wait_for(lambda: tmux("capture-pane", "-p"), "train.py (pid")
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
    code = (
        "import unisono.cli.top as t, time, os\n"
        "reader = t.RunsReader(t.runs_folder(os.environ))\n"
        "for _ in range(6): t.look(reader); time.sleep(0.5)"
    )
    EventFile(tmp_path, writer()).write(progress())
    script = f"{code}\nprint(time.process_time())"
    env = os.environ | {"UNISONO_RUNS": str(tmp_path)}
    base = subprocess.run(
        [sys.executable, "-c", "import unisono.cli.top, time; print(time.process_time())"],
        env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) - float(base.stdout) < 1.0
