"""Event files, written and read without a framework; and a disk that is full."""

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from event_records import progress, writer

from unisono.monitor.events import (
    EventFile,
    RunsReader,
    read_runs,
    run_name,
    runs_folder,
    ticks_of,
)


def test_the_last_record_of_each_process_is_read(tmp_path):
    for rank in (1, 0):
        file = EventFile(tmp_path, writer(rank=rank))
        for step in range(3):
            file.write(progress(step=step))
        file.close()
    (ranks,) = read_runs(tmp_path).values()
    assert [events.writer for events in ranks] == [writer(rank=0), writer(rank=1)]
    assert [events.last for events in ranks] == [progress(step=2)] * 2
    assert all(events.is_alive for events in ranks)


def test_a_process_that_is_gone_or_another_one_is_not_alive(tmp_path):
    for rank, changes in enumerate([{"pid": 2**22 + 1}, {"started": 1.0}]):
        EventFile(tmp_path, writer(rank=rank, **changes)).write(progress())
    EventFile(tmp_path, writer(rank=2)).write(progress(is_over=True))
    (ranks,) = read_runs(tmp_path).values()
    assert [events.is_alive for events in ranks] == [False] * 3


def test_a_process_that_is_stopped_or_has_just_ended(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        mine = writer(pid=process.pid, started=ticks_of(process.pid))
        EventFile(tmp_path, mine).write(progress())
        try:
            assert states_of(tmp_path, is_alive=True) == (True, False)
            os.kill(process.pid, signal.SIGSTOP)
            assert states_of(tmp_path, is_stopped=True) == (True, True)
        finally:
            process.kill()
        # Nobody has asked for its exit code yet.
        assert states_of(tmp_path, is_alive=False) == (False, False)
        assert ticks_of(process.pid)


def states_of(folder: Path, **expected: bool) -> tuple[bool, bool]:
    """Whether the only process is alive and stopped, once it is as expected, or after a while."""
    deadline = time.monotonic() + 10
    while True:
        ((events,),) = read_runs(folder).values()
        is_so = all(getattr(events, name) == value for name, value in expected.items())
        if is_so or time.monotonic() > deadline:
            return events.is_alive, events.is_stopped
        time.sleep(0.02)


def test_other_hosts_and_broken_files_are_left_out(tmp_path):
    EventFile(tmp_path, writer(run="a", host="elsewhere"))
    EventFile(tmp_path, writer(run="b"))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "rank-0.jsonl").write_text('{"half')
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "rank-0.jsonl").write_text("[" * 8000)
    with (tmp_path / "b" / "rank-0.jsonl").open("a") as file:
        file.write(json.dumps(dataclasses.asdict(progress())) + '\n{"half')
    found = read_runs(tmp_path)
    assert list(found) == ["b"]
    assert found["b"][0].last == progress()
    assert read_runs(tmp_path / "nowhere") == read_runs(None) == {}


def test_a_long_file_begins_anew(tmp_path):
    file = EventFile(tmp_path, writer())
    for _ in range(8000):
        file.write(progress())
    assert (tmp_path / "run" / "rank-0.jsonl").stat().st_size < 2**16 + 300
    assert read_runs(tmp_path)["run"][0].last == progress()


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    file = EventFile(tmp_path / "file", writer())
    file.write(progress())
    assert not file.is_open


def test_a_full_disk(tmp_path):
    """By a limit on the size of files, under which writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = EventFile(tmp_path, writer())
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, before[1]))
        for _ in range(20):
            file.write(progress())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not file.is_open
    assert read_runs(tmp_path)["run"][0].writer == writer()


def test_runs_that_are_long_past_are_forgotten(tmp_path):
    EventFile(tmp_path, writer(run="old"))
    os.utime(tmp_path / "old" / "rank-0.jsonl", (0, 0))
    os.utime(tmp_path / "old", (0, 0))
    EventFile(tmp_path, writer(run="new"))
    assert list(read_runs(tmp_path)) == ["new"]


def test_thousands_of_past_runs_cost_a_listing(tmp_path, monkeypatch):
    """`unisono top` refreshes twice a second, whatever has run here before."""
    gone, count = 2**22 + 1, 5000
    text = "".join(
        json.dumps(dataclasses.asdict(each)) + "\n"
        for each in (writer(pid=gone, world_size=1), progress(is_over=True))
    )
    for i in range(count):
        folder = tmp_path / f"old-{i}"
        folder.mkdir()
        (folder / "rank-0.jsonl").write_text(text.replace('"run": "run"', f'"run": "old-{i}"'))
        os.utime(folder, (1000 + i, 1000 + i))
    alive = EventFile(tmp_path, writer(run="alive", world_size=1))
    alive.write(progress())
    opened: list[Path] = []
    plain = Path.open

    def counted(path, *args, **kwargs):
        opened.append(path)
        return plain(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", counted)
    reader = RunsReader(tmp_path)
    first = reader.read()
    assert list(first)[:2] == ["alive", f"old-{count - 1}"]
    assert len([path for path in opened if tmp_path in path.parents]) == len(first) == 51
    opened.clear()
    alive.write(progress(step=9))
    again = reader.read()
    assert [path for path in opened if tmp_path in path.parents] == [
        tmp_path / "alive" / "rank-0.jsonl"
    ]
    assert again["alive"][0].last == progress(step=9)
    assert list(again) == list(first)


def test_a_program_has_one_folder_however_often_it_trains(tmp_path):
    for step in range(3):
        file = EventFile(tmp_path, writer(run=run_name()))
        file.write(progress(step=step, is_over=True))
        file.close()
    assert os.listdir(tmp_path) == [run_name()]
    (ranks,) = read_runs(tmp_path).values()
    assert [events.last for events in ranks] == [progress(step=2, is_over=True)]
    assert run_name(seed=255).endswith("-run-ff")


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"UNISONO_RUNS": "/a"}, Path("/a")),
        ({"UNISONO_RUNS": ""}, None),
        ({"XDG_STATE_HOME": "/b"}, Path("/b/unisono/runs")),
    ],
)
def test_where_runs_publish(env, expected):
    assert runs_folder(env) == expected


def test_events_load_no_framework():
    code = "import sys, unisono.cli.top; print({'keras', 'jax'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
