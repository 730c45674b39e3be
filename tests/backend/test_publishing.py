"""What `fit` publishes of itself, and what it does not cost."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from launching import wait_for

import unisono
from unisono import telemetry
from unisono.callbacks import DeviceStats
from unisono.monitor.events import RankEvents, read_runs
from unisono.monitor.verdict import verdict_on_run

X, Y = np.ones((64, 4), "float32"), np.ones((64, 1), "float32")


def net(replicas: int = 2) -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model = unisono.parallel(model, replicas=replicas)
    model.compile("sgd", "mse")
    return model


class Slowly(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None) -> None:
        time.sleep(0.05)


def test_a_fit_publishes_how_it_goes(tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_RUNS", str(tmp_path))
    seen = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None) -> None:
            seen.extend(read_runs(tmp_path).values())

    net().fit(X, Y, batch_size=8, epochs=6, verbose=0, callbacks=[Slowly(), Look()])
    (last,) = seen[-1]
    assert last.is_alive
    assert last.writer.backend == keras.backend.backend()
    assert (last.writer.pid, last.writer.num_replicas) == (os.getpid(), 2)
    assert last.last.num_epochs == 6
    assert last.last.num_steps == 8
    assert 0 < last.last.steps_per_s < 20
    assert last.last.samples_per_s == pytest.approx(8 * last.last.steps_per_s)
    assert np.isfinite(last.last.loss)
    (ended,) = next(iter(read_runs(tmp_path).values()))
    assert not ended.is_alive
    assert ended.last.is_over
    assert (ended.last.epoch, ended.last.step) == (6, 8)


def test_only_what_runs_published_is_forgotten(tmp_path, monkeypatch):
    """The folder of `UNISONO_RUNS` may be one in which the user keeps a year of results."""
    runs, week_ago = tmp_path / "runs", time.time() - 8 * 24 * 3600
    monkeypatch.setenv("UNISONO_RUNS", str(runs))
    net().fit(X, Y, batch_size=8, verbose=0)
    (mine,) = runs.iterdir()
    records = (mine / "rank-0.jsonl").read_bytes()
    alien = records.replace(mine.name.encode(), b"another", 1)

    def folder(name: str, files: dict[str, bytes]) -> None:
        for path, content in files.items():
            file = runs / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)

    def named(name: str) -> bytes:
        return records.replace(mine.name.encode(), name.encode(), 1)

    folder("results", {"weights.h5": b"x", "notes/a.txt": b"y"})
    folder("theirs", {"rank-0.jsonl": b'{"loss": 1}\n'})
    folder("deep", {"rank-0.jsonl": b"[" * 8000 + b"\n"})
    folder("copied", {"rank-0.jsonl": alien})
    folder("mixed", {"rank-0.jsonl": named("mixed"), "notes.txt": b"mine"})
    folder("nested", {"rank-0.jsonl": named("nested"), "rank-1.jsonl/a": b"mine"})
    folder("old", {"rank-0.jsonl": named("old"), "rank-1.new": named("old")})
    folder("fresh", {"rank-0.jsonl": named("fresh")})
    (runs / "empty").mkdir()
    folder("linked", {"rank-0.jsonl": named("linked")})
    (runs / "linked" / "rank-1.jsonl").symlink_to(runs / "results" / "weights.h5")
    folder("../elsewhere", {"rank-0.jsonl": named("elsewhere")})
    (runs / "elsewhere").symlink_to(tmp_path / "elsewhere")
    files = [path for path in tmp_path.rglob("*") if "fresh/" not in str(path)]
    for path in sorted(files, reverse=True):
        os.utime(path, (week_ago, week_ago), follow_symlinks=False)
    os.utime(runs / "fresh", (week_ago, week_ago))  # Of a run that has gone on for long.
    before = set(tmp_path.rglob("*"))
    net().fit(X, Y, batch_size=8, verbose=0)
    gone = {str(path.relative_to(runs)) for path in before - set(tmp_path.rglob("*"))}
    assert {path.split("/")[0] for path in gone} == {"old"}
    assert not (runs / "old").exists()
    assert mine.exists()  # Of the same program, which wrote it anew.


class Never:
    """A loss that its device does not come to compute, until it is let go."""

    def __init__(self) -> None:
        self.is_there = threading.Event()

    def __array__(self, dtype=None, copy=None):
        self.is_there.wait()
        return np.ones((), dtype)


def test_a_loss_that_does_not_come_does_not_hold_up_a_record():
    loss, never = telemetry.Loss(), Never()
    assert loss.newest({"loss": np.float32(0.5)}) == 0.5
    start = time.monotonic()
    try:
        assert [loss.newest({"loss": never}) for _ in range(3)] == [0.5] * 3
        assert time.monotonic() - start < 2
    finally:
        never.is_there.set()


@pytest.mark.slow
def test_the_process_that_is_stopped_then_killed_is_named_and_not_the_other(folder, run):
    runs = folder / "runs"
    program = Path(__file__).with_name("endless.py")
    env = {"UNISONO_RUNS": str(runs), "KERAS_BACKEND": keras.backend.backend()}
    run("--replicas", 2, program, folder, **env)
    wait_for(folder, "ready-0", "ready-1", timeout_s=240)
    ranks_once(runs, lambda rank: rank.last is not None)
    held = int((folder / "pid-1").read_text())
    os.kill(held, signal.SIGSTOP)
    time.sleep(4)
    now = time.time()
    ranks = ranks_once(runs, lambda rank: rank.is_alive)
    assert [now - rank.last.at < 3 for rank in ranks] == [True, False]
    assert [rank.is_stopped for rank in ranks] == [False, True]
    assert ranks[0].last.steps_per_s == 0
    assert verdict_on_run(ranks, now).startswith("rank 1 is stopped")
    os.kill(held, signal.SIGKILL)
    ranks = ranks_once(runs, lambda rank: not rank.is_alive)
    assert verdict_on_run(ranks).startswith("rank 1 is gone without a word")


@pytest.mark.slow
def test_a_run_beside_other_programs_says_that_cores_are_short(folder, run):
    runs = folder / "runs"
    program = Path(__file__).with_name("endless.py")
    env = {"UNISONO_RUNS": str(runs), "KERAS_BACKEND": keras.backend.backend()}
    started = run("--replicas", 2, program, folder, **env)
    wait_for(folder, "ready-0", "ready-1", timeout_s=240)
    busy = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    others = [
        subprocess.Popen([sys.executable, "-c", busy, str(core)])
        for core in os.sched_getaffinity(0)
    ]
    try:
        line = ""
        while not line.startswith("unisono: cores are short"):
            line = started.process.stderr.readline()
            assert line, "the run has ended"
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert re.search(r"other programs take \d\d% of the processor time that ranks? [01]", line)


def ranks_once(runs: Path, is_so) -> list[RankEvents]:
    """The processes of the only run, once something holds of each."""
    deadline = time.monotonic() + 60
    while True:
        (ranks,) = read_runs(runs).values()
        if all(map(is_so, ranks)):
            return ranks
        assert time.monotonic() < deadline, ranks
        time.sleep(0.1)


def test_what_stopped_a_training_is_published(tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_RUNS", str(tmp_path))

    class Break(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None) -> None:
            raise RuntimeError("broken on purpose")

    with pytest.raises(RuntimeError, match="broken on purpose"):
        net().fit(X, Y, batch_size=8, verbose=0, callbacks=[Break()])
    (ended,) = next(iter(read_runs(tmp_path).values()))
    assert ended.last.is_over
    assert ended.last.failed_with == "RuntimeError"


def test_nothing_is_published_where_nobody_wants_it(tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_RUNS", "")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    net().fit(X, Y, batch_size=8, verbose=0)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_does_not_matter(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("UNISONO_RUNS", str(tmp_path / "file" / "runs"))
    history = net().fit(X, Y, batch_size=8, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


def test_keras_gets_its_own_function_back(tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_RUNS", str(tmp_path))
    model = net()
    model.fit(X, Y, batch_size=8, verbose=0)
    before = model.train_function

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, batch_size=8, verbose=0, callbacks=[Stop()])
    assert model.train_function is before
    model.fit(X, Y, batch_size=8, verbose=0)
    assert model.train_function is before


def test_device_stats_are_in_the_logs(tmp_path):
    path = tmp_path / "log.csv"
    callbacks = [DeviceStats(every_s=0.05), keras.callbacks.CSVLogger(str(path))]
    history = net().fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks).history
    assert "cpu_0_load" in path.read_text().splitlines()[0]
    assert all(0 <= load <= 1 for load in history["cpu_0_load"])
    assert all(memory > 0 for memory in history["cpu_0_memory_gb"])
