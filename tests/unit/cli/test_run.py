"""`unisono run` with real processes: what it starts, how runs fail, and that nothing is left."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launching import END_S, SCRIPT, ended_within, pids_in, wait_for

import unisono
from unisono.cli import main
from unisono.cli import run as launcher
from unisono.errors import LaunchError
from unisono.launch.failure import Outcome
from unisono.launch.launcher import perform
from unisono.launch.request import Request

NODE = ("--nodes", "2", "--node-rank")
ECHO = """
import json, os, pickle, sys
import unisono
class Own: pass
pickle.loads(pickle.dumps(Own()))
print(json.dumps({"argv": sys.argv, "path": sys.path[0], "file": __file__, "name": __name__,
    "rank": unisono.topology().rank, "size": unisono.topology().world_size,
    "cores": sorted(os.sched_getaffinity(0)), "env": dict(os.environ),
    "is_main": sys.modules["__main__"].Own is Own}))
"""
# Rank 0 gets a Ctrl-C while it waits for rank 1 at a point, and goes on to the next one: the first
# time after rank 1 came to that point, the second time before.
INTERRUPTED = """
import os, signal, sys, threading, time
from pathlib import Path
import unisono
from unisono.launch.client import current_world
world, folder = current_world(), Path(sys.argv[1])
def interrupt():
    main = threading.main_thread().ident
    while sys._current_frames()[main].f_code.co_name != "_fill":
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.02)
for turn in range(2):
    if world.rank == 0:
        threading.Thread(target=interrupt).start()
        try:
            world.all_gather(f"left {turn}", [turn, "left"])
        except KeyboardInterrupt:
            (folder / f"interrupted {turn}").touch()
        if turn == 0:
            wait_for("past 0")
    else:
        wait_for(f"interrupted {turn}")
        time.sleep(0.2 * turn)
        assert world.all_gather(f"left {turn}", [turn, "came"]) == [[turn, "left"], [turn, "came"]]
        (folder / f"past {turn}").touch()
    assert world.all_gather(f"next {turn}", world.rank) == [0, 1]
    assert world.add("sum", 1) > 0
print("well")
"""


def misbehaving(run, folder: Path, how: str, *options: object, **env: str):
    """Exit code and last words of a run of three processes, of which nothing is left."""
    code, _, err = run("--replicas", 3, *options, SCRIPT, folder, how, **env).wait()
    assert ended_within(pids_in(folder), 0.5)
    assert len(pids_in(folder)) >= 3
    pid = (folder / "pid-1").read_text()
    before, found, last = err.rpartition(f"unisono: rank 1 (process {pid} on host ")
    assert found, err
    return code, last, before


def echoed(out: str) -> dict:
    return json.loads(out.splitlines()[-1])


# -- what is started -------------------------------------------------------------------------------


def test_processes_meet_and_end_well(run, folder):
    code, out, err = run("--replicas", 3, SCRIPT, folder, "well").wait()
    assert (code, out) == (0, "rank 0 of 3 is here\n[0, 1, 2]\n")
    assert err == "a word to stderr of rank 0\n"
    assert ended_within(pids_in(folder), 0.5)


def test_a_question_that_an_interrupt_ended_leaves_no_answer_behind(run, folder):
    script = folder / "script.py"
    script.write_text(INTERRUPTED)
    code, out, err = run("--replicas", 2, "--timeout", 10, script, folder).wait()
    assert (code, out, err) == (0, "well\n", "")


def test_a_script_runs_as_python_runs_it(run, tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "echo.py").write_text(ECHO)
    monkeypatch.chdir(tmp_path)
    words = ["--", "--replicas", "1", "-m", "--", "--gpus"]
    code, out, err = run("--replicas", 2, "inner/echo.py", *words).wait()
    assert (code, err) == (0, "")
    found = echoed(out)
    assert found["argv"] == ["inner/echo.py", *words]
    assert found["path"] == str(tmp_path / "inner")
    assert found["file"] == str(tmp_path / "inner" / "echo.py")
    assert (found["name"], found["is_main"]) == ("__main__", True)
    assert (found["rank"], found["size"]) == (0, 2)


def test_a_module_runs_as_python_runs_it(run, tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("")
    (tmp_path / "own" / "__main__.py").write_text(ECHO)
    monkeypatch.chdir(tmp_path)
    code, out, err = run("--replicas", 1, "-m", "own", "--", "-m", "x").wait()
    assert (code, err) == (0, "")
    found = echoed(out)
    assert found["argv"] == [str(tmp_path / "own" / "__main__.py"), "--", "-m", "x"]
    assert found["path"] == str(tmp_path)
    assert (found["name"], found["is_main"]) == ("__main__", True)


def test_a_folder_with_a_main_module(run, tmp_path):
    (tmp_path / "__main__.py").write_text(ECHO)
    code, out, err = run("--", tmp_path, "x").wait()
    assert (code, err) == (0, "")
    assert echoed(out)["argv"] == [str(tmp_path), "x"]
    assert echoed(out)["path"] == str(tmp_path)


def test_each_process_has_its_own_cores_and_threads(run, tmp_path):
    (tmp_path / "echo.py").write_text(ECHO)
    all_cores = sorted(os.sched_getaffinity(0))
    if len(all_cores) < 2:
        pytest.skip("there is one core only")
    code, _, _ = run(
        "--replicas", 2, "--log-dir", tmp_path, tmp_path / "echo.py", MKL_NUM_THREADS="7"
    ).wait()
    assert code == 0
    found = [echoed((tmp_path / f"rank-{rank}.log").read_text()) for rank in (0, 1)]
    assert found[0]["cores"] + found[1]["cores"] == all_cores
    for each in found:
        env = each["env"]
        assert env["OMP_NUM_THREADS"] == env["TF_NUM_INTRAOP_THREADS"] == str(len(each["cores"]))
        assert env["MKL_NUM_THREADS"] == "7"
        assert env["UNISONO_HOST"] == "127.0.0.1"
        assert env["GLOO_SOCKET_IFNAME"] == "lo"
        assert "UNISONO_REPLICAS" not in env


def test_more_processes_than_cores_are_not_pinned(run, tmp_path):
    (tmp_path / "echo.py").write_text(ECHO)
    cores = sorted(os.sched_getaffinity(0))
    code, out, _ = run("--replicas", len(cores) + 1, tmp_path / "echo.py").wait()
    assert code == 0
    assert echoed(out)["cores"] == cores
    assert echoed(out)["env"]["OMP_NUM_THREADS"] == "1"


def test_each_process_has_one_gpu_of_those_asked_for(run, tmp_path):
    (tmp_path / "echo.py").write_text(ECHO)
    code, out, err = run(
        "--gpus", "0,2", "--memory", "0.5", tmp_path / "echo.py", UNISONO_SIMULATED_GPUS="3"
    ).wait()
    assert (code, err) == (0, "")
    env = echoed(out)["env"]
    assert (echoed(out)["size"], env["UNISONO_SIMULATED_GPUS"]) == (2, "1")
    assert json.loads(env["UNISONO_POLICY"])["memory"] == 0.5


def test_a_child_of_a_process_is_not_a_member(run, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import subprocess, sys, unisono\n"
        "code = 'import unisono; print(unisono.topology().world_size)'\n"
        "subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    code, out, err = run("--replicas", 2, script).wait()
    assert (code, out, err) == (0, "1\n", "")


def test_processes_of_multiprocessing_find_the_program(run, tmp_path):
    script = tmp_path / "pool.py"
    script.write_text(
        "import multiprocessing, unisono\n"
        "def double(x): return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(double, [1, 2]))\n"
    )
    code, out, err = run("--replicas", 2, script).wait()
    assert (code, out, err) == (0, "[2, 4]\n", "")


ASK = """
import os, sys
print('unisono.compat.legacy' in sys.modules, 'UNISONO_LEGACY' in os.environ)
"""


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("is_legacy", [True, False])
def test_old_names_are_for_processes_that_are_to_have_them(run, tmp_path, replicas, is_legacy):
    script = tmp_path / "ask.py"
    child = f"import subprocess\nsubprocess.run([sys.executable, '-c', {ASK!r}])\n"
    script.write_text(ASK + child)
    options = ["--legacy"] if is_legacy else []
    code, out, err = run(
        *("--replicas", replicas, "--show", "all", *options, script),
        UNISONO_LEGACY="" if is_legacy else "1",
    ).wait()
    assert (code, err) == (0, "")
    lines = sorted(line.removeprefix("[rank 1] ") for line in out.splitlines())
    # What a process starts has not asked for it.
    assert lines == sorted([f"{is_legacy} False", "False False"] * replicas)


def test_an_old_program_that_is_python_2_is_not_started(run, tmp_path):
    script = tmp_path / "old.py"
    script.write_text("import keras\nprint 'hello'\n")
    code, out, err = run("--legacy", "--replicas", 2, script).wait()
    assert (code, out) == (1, "")
    assert err.startswith(f"unisono: {script}, line 2 is Python 2: a print statement")
    assert "Traceback" not in err


def test_old_names_take_one_task_on_each_node(monkeypatch, capsys):
    monkeypatch.setattr(launcher, "read_step", lambda environment: object())
    monkeypatch.setattr(launcher, "launcher_role", lambda step: ("rank", ""))
    with pytest.raises(SystemExit):
        main(["run", "--legacy", "old.py"])
    assert "--legacy needs one task on each node" in capsys.readouterr().err


def test_several_runs_at_once(run, tmp_path):
    runs = []
    for i in range(3):
        (tmp_path / str(i)).mkdir()
        runs.append(run("--replicas", 2, SCRIPT, tmp_path / str(i), "well"))
    for each in runs:
        code, out, _ = each.wait()
        assert (code, out) == (0, "rank 0 of 2 is here\n[0, 1]\n")


# -- output ----------------------------------------------------------------------------------------


def test_all_output_on_request(run, folder):
    code, out, err = run("--replicas", 3, "--show", "all", SCRIPT, folder, "well").wait()
    assert code == 0
    lines = ["rank 0 of 3 is here", "[0, 1, 2]"]
    for rank in (1, 2):
        lines += [f"[rank {rank}] rank {rank} of 3 is here", f"[rank {rank}] [0, 1, 2]"]
    assert sorted(out.splitlines()) == sorted(lines)
    assert "[rank 2] a word to stderr of rank 2\n" in err


@pytest.mark.parametrize("show", ["all", "chief"])
def test_everything_is_in_the_log_folder(run, folder, show):
    logs = folder / "deep" / "logs"
    options = ["--replicas", 2, "--log-dir", logs, "--show", show]
    code, out, err = run(*options, SCRIPT, folder, "well").wait()
    assert code == 0
    for rank in (0, 1):
        text = (logs / f"rank-{rank}.log").read_text()
        lines = [f"rank {rank} of 2 is here", f"a word to stderr of rank {rank}", "[0, 1]"]
        assert sorted(text.splitlines()) == sorted(lines)
    assert "rank 0 of 2 is here\n" in out
    assert "a word to stderr of rank 0\n" in err
    assert ("[rank 1] rank 1 of 2 is here" in out) == (show == "all")


def test_the_chief_sees_a_terminal_if_there_is_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print('terminal', sys.stdout.isatty()); print('two')")
    command = [sys.executable, "-m", "unisono", "run", "--log-dir", str(tmp_path), str(script)]
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        try:
            while data := os.read(ours, 4096):
                shown += data
        except OSError:
            pass
        assert process.wait(60) == 0
    os.close(ours)
    assert shown == b"terminal True\r\ntwo\r\n"
    assert (tmp_path / "rank-0.log").read_bytes() == b"terminal True\ntwo\n"


def test_the_chief_reads_what_the_launcher_is_given(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.stdin.read().upper())")
    command = [sys.executable, "-m", "unisono", "run", str(script)]
    done = subprocess.run(command, input="words", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "WORDS\n")


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "code", "cause", "trace"),
    [
        ("raise", 1, "raised ValueError", "ValueError: boom"),
        ("exit3", 3, "ended itself with exit code 3", "SystemExit: 3"),
        ("say and exit", 1, "ended itself with exit code 1", "SystemExit: no data"),
        ("leave at once", 1, "ended without finishing its program", None),
        ("SIGKILL", 137, "was ended by SIGKILL, which unisono did not send", None),
        ("SIGTERM", 143, "was ended by SIGTERM", None),
        ("crash", 139, "was ended by SIGSEGV", "in string_at"),
    ],
)
def test_a_process_that_fails_ends_the_run(run, folder, how, code, cause, trace):
    found, last, before = misbehaving(run, folder, how)
    assert found == code
    assert cause in last.splitlines()[0]
    assert "After it: rank " in last
    assert "[rank 1] rank 1 of 3 is here" in before
    if trace is not None:
        assert trace in last
        assert f'"{SCRIPT}", line' in last
    if how == "raise":
        assert last.splitlines()[-1] == "ValueError: boom"
        assert last.count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize("how", ["exit0", "loop"])
def test_ranks_that_part_are_explained(run, folder, how):
    """One ends well, or does something else, while the others wait for it: never a hang."""
    code, _, err = run("--replicas", 3, "--timeout", 2, SCRIPT, folder, how).wait()
    assert code == 1
    assert ended_within(pids_in(folder), 0.5)
    last = err.rpartition("unisono: rank ")[2]
    if how == "exit0":
        assert "raised DisagreementError" in last
        assert re.search("Rank 1 has ended its program, while rank.* at “the last point”", last)
    else:
        assert "did not come to “the last point” within 2 s" in last
        assert "It was at “the first point”. Waiting at “the last point”: rank 0, 2." in last


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("SIGSTOP", "has been stopped (SIGSTOP, or Ctrl-Z) for "),
        ("hold the lock", "has been silent for "),
    ],
)
def test_a_process_without_progress_is_named_and_all_stacks_are_shown(run, folder, how, cause):
    code, last, before = misbehaving(run, folder, how, "--timeout", 3)
    assert code == 1
    assert cause in last
    assert "It was at “the first point”. Waiting at “the last point”: rank 0, 2." in last
    for rank in range(3):
        pid = (folder / f"pid-{rank}").read_text()
        header, stack = f"rank {rank} (process {pid} on host ", f'File "{SCRIPT}", line'
        assert stack in before.split(header)[1].split("\n\n")[0]


def test_processes_that_do_not_end_when_asked_are_killed(run, folder):
    started = run("--replicas", 3, SCRIPT, folder, "ignore TERM")
    wait_for(folder, *(f"ready-{rank}" for rank in range(3)))
    pids = pids_in(folder)
    os.kill(int((folder / "pid-2").read_text()), signal.SIGKILL)
    assert ended_within(pids, END_S)
    assert started.wait()[0] == 137


def test_what_a_program_started_ends_with_it(run, folder):
    started = run("--replicas", 2, SCRIPT, folder, "start others")
    wait_for(folder, "ready-0", "ready-1")
    pids = pids_in(folder)
    assert len(pids) == 4
    os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)
    assert ended_within(pids, END_S)
    assert started.wait()[0] == 137


@pytest.mark.parametrize(
    "how", ["sleep", "ignore TERM", "sleep in C", "hold the lock", "start others"]
)
def test_nobody_outlives_a_launcher_that_was_killed(run, folder, how):
    started = run("--replicas", 2, SCRIPT, folder, how)
    wait_for(folder, "ready-0", "ready-1")
    time.sleep(0.2)  # Into the C code.
    pids = pids_in(folder)
    started.process.kill()
    assert ended_within(pids, END_S)


def test_without_the_guard_processes_watch_their_launcher_themselves(run, folder):
    started = run("--replicas", 2, SCRIPT, folder, "sleep")
    wait_for(folder, "ready-0", "ready-1")
    pids = pids_in(folder)
    children = Path(f"/proc/{started.process.pid}/task/{started.process.pid}/children")
    (guard,) = {int(pid) for pid in children.read_text().split()} - set(pids)
    os.kill(guard, signal.SIGKILL)
    started.process.kill()
    assert ended_within(pids, END_S)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_launcher_that_is_asked_to_end_ends_all(run, folder, number, code):
    started = run("--replicas", 2, SCRIPT, folder, "sleep")
    wait_for(folder, "ready-0", "ready-1")
    pids = pids_in(folder)
    started.process.send_signal(number)
    assert ended_within(pids, END_S)
    found, _, err = started.wait()
    assert found == code
    assert err.splitlines()[-1].endswith(
        f"was told to end the run by {number.name}. All processes of the run were ended."
    )
    # The program may put its things in order: it sees an ordinary Ctrl-C.
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)


def test_a_second_interrupt_does_not_wait(run, folder):
    started = run("--replicas", 2, SCRIPT, folder, "hold the lock")
    wait_for(folder, "ready-0", "ready-1")
    pids = pids_in(folder)
    started.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    started.process.send_signal(signal.SIGINT)
    assert ended_within(pids, 2.0)
    assert started.wait()[0] == 130


def test_a_process_that_lacks_memory_is_explained(run, folder):
    group = Path(f"/sys/fs/cgroup/memory/unisono-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(256 << 20))
    except OSError as error:
        pytest.skip(f"no memory limit can be set here: {error}")
    try:
        enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
        started = run("--replicas", 2, SCRIPT, folder, "take memory", prefix=enter)
        code, _, err = started.wait()
    finally:
        assert ended_within(pids_in(folder), END_S)
        group.rmdir()
    assert code == 137
    assert "was ended by SIGKILL, most likely by the kernel for want of memory" in err


# -- from Python -----------------------------------------------------------------------------------


def test_a_run_from_python_shows_and_tells(folder):
    shown: dict[int, bytes] = {1: b"", 2: b""}

    def show(number: int, data: bytes) -> None:
        shown[number] += data

    request = Request((str(SCRIPT), str(folder), "raise"), num_processes=2, show=show)
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(perform(request)))
    thread.start()
    thread.join(60)
    (outcome,) = outcomes
    assert outcome.first is not None
    assert (outcome.code, outcome.first.rank, outcome.first.kind) == (1, 1, "raised")
    assert outcome.first.traceback.endswith("ValueError: boom\n")
    assert shown[1] == b"rank 0 of 2 is here\n"
    assert b"PeerLostError: Rank 1 " in shown[2]
    assert b"Traceback" not in shown[2]  # The outcome has the one that matters.
    assert ended_within(pids_in(folder), 0.5)


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nowhere.py"], 1, "Asked to run 'nowhere.py'; it cannot be read: No such file"),
        (["-m", "nowhere.at_all"], 1, "Asked to run the module 'nowhere.at_all'; Python finds"),
        (["-m", "json.nowhere"], 1, "Asked to run the module 'json.nowhere'; Python finds none"),
        (["-m", "json"], 1, "Asked to run the module 'json'; Python finds none"),
        ([], 2, "the following arguments are required: script"),
        (["--replicas", "0", SCRIPT], 2, "'0' is not a whole number of at least 1"),
        (["--replicas", "two", SCRIPT], 2, "'two' is not a whole number of at least 1"),
        (["--timeout", "-1", SCRIPT], 2, "'-1' is not a number of seconds above 0"),
        (["--nodes", "2", SCRIPT], 2, "--nodes needs both --node-rank"),
        (["--node-rank", "1", SCRIPT], 2, "--node-rank and --coordinator need --nodes"),
        (
            [*NODE, "2", "--coordinator", "a:1", SCRIPT],
            2,
            "--node-rank 2 is outside: nodes are 0 to 1",
        ),
        (
            [*NODE, "0", "--coordinator", "here", SCRIPT],
            1,
            "Found 'here' where an address is expected. Write host:port",
        ),
        (
            [*NODE, "0", "--coordinator", "192.0.2.77:4000", SCRIPT],
            1,
            "The address '192.0.2.77' is not this machine's, which has lo (127.0.0.1)",
        ),
        (
            [*NODE, "0", "--coordinator", "no.such.host.:1", SCRIPT],
            1,
            "No address is known for the host 'no.such.host.'",
        ),
        (
            [*NODE, "1", "--coordinator", "127.0.0.1:1", "--start-timeout", "0.5", SCRIPT],
            1,
            "No answer from the rendezvous server at 127.0.0.1:1 within 0.5 s",
        ),
        (
            [*NODE, "0", "--coordinator", "127.0.0.1:1", "--interface", "none0", SCRIPT],
            1,
            "Asked for the interface 'none0'; this machine has lo (127.0.0.1)",
        ),
        (["--gpus", "0", SCRIPT], 1, "Asked for gpus=[0]; found no visible GPU"),
        (["--memory", "8 apples", SCRIPT], 1, "Asked for memory='8 apples'"),
        (["-np", "3", "--replicas", "2", SCRIPT], 2, "--replicas is 2, and -np means 3"),
        (["-np", "3", "-H", "localhost:2", SCRIPT], 1, "Asked for -np 3; the hosts of -H have 2"),
        (["-H", "localhost:x", SCRIPT], 1, "Found 'localhost:x' in -H 'localhost:x'"),
        (["--log-dir", "/proc/no", SCRIPT], 1, "Asked for logs in /proc/no: No such file"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(run, tmp_path, words, code, said):
    found, out, err = run(*words, UNISONO_SECRET="s").wait()
    assert (found, out) == (code, "")
    assert said in " ".join(err.split())
    assert "Traceback" not in err


def test_the_spellings_of_horovod(run, folder):
    options = ["-np", 3, "-H", "localhost:2,127.0.0.1:2"]
    code, out, _ = run(*options, SCRIPT, folder, "well").wait()
    assert (code, out) == (0, "rank 0 of 3 is here\n[0, 1, 2]\n")


def test_other_hosts_are_not_logged_in_to(run):
    code, _, err = run("-np", 3, "-H", "a:2,b:2", "train.py", "--epochs", 2).wait()
    assert code == 2
    assert "unisono does not log in to other hosts." in err
    lines = re.findall("  on (.*)", err)
    port = re.search(r"a:(\d+)", lines[0])[1]
    common = f"--nodes 2 --node-rank {{}} --coordinator a:{port} train.py --epochs 2"
    assert lines == [
        f"a:  unisono run --replicas 2 {common.format(0)}",
        f"b:  unisono run --replicas 1 {common.format(1)}",
    ]


def test_other_hosts_are_told_of_old_programs(run):
    _, _, err = run("-np", 2, "-H", "a:1,b:1", "--legacy", "old.py").wait()
    assert re.findall("--legacy old.py", err) == ["--legacy old.py"] * 2


def test_help_names_every_option(run):
    code, out, _ = run("--help").wait()
    assert code == 0
    for option in (
        "--replicas",
        "--gpus",
        "--legacy",
        "-np",
        "-H",
        "--nodes",
        "--log-dir",
        "--timeout",
    ):
        assert option in out


def test_an_interface_that_is_not_there_is_told_with_one_process_too(run, folder):
    code, _, err = run("--replicas", 1, "--interface", "nope", SCRIPT, folder, "well").wait()
    assert code not in (0, -signal.SIGKILL)
    assert "Asked for the interface 'nope'; this machine has " in err
    assert "Traceback" not in err
    assert not pids_in(folder)


def test_a_timeout_of_the_environment_that_is_none_is_told(run, folder, monkeypatch):
    code, _, err = run("--replicas", 1, SCRIPT, folder, "well", UNISONO_TIMEOUT="soon").wait()
    assert code == 2
    assert "'soon' is not a number of seconds above 0" in err
    assert "Traceback" not in err
    monkeypatch.setenv("UNISONO_TIMEOUT", "nan")
    with pytest.raises(LaunchError, match="Found UNISONO_TIMEOUT='nan' in the environment"):
        unisono.spawn(print, replicas=1)
    assert main(["devices"]) == 0  # It has no use for one.
