"""Standard streams of a run: rank 0 reads input for all, and output passes through one thread."""

import fcntl
import json
import os
import subprocess
import sys
import termios
import threading
from pathlib import Path
from typing import Any

from unisono.launch.streams import Output

PROGRAM = """
import json, sys
from pathlib import Path
import unisono

facts = unisono.topology()
sys.stdin.reconfigure(encoding="utf-8")
token = input("token: ") if facts.is_chief else None
answers = [input("name: "), input("epochs: ")]
lines = [line for line in sys.stdin]
Path(sys.argv[1], f"rank-{facts.rank}.json").write_text(json.dumps([token, *answers, lines]))
"""
COMMAND = [sys.executable, "-m", "unisono", "run", "--replicas", "2"]


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("UNISONO_")}


def run(folder: Path, program: str, **options: Any) -> Any:
    (folder / "program.py").write_text(program)
    command = [*COMMAND, str(folder / "program.py"), str(folder)]
    options = {"capture_output": True, "text": True, "timeout": 120, **options}
    return subprocess.run(command, env=environment(), **options)


def read(folder: Path) -> list[Any]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_all_processes_get_the_lines_that_the_first_reads(tmp_path):
    done = run(tmp_path, PROGRAM, input="secret\nalice\n3\nx\ny\n")
    assert done.returncode == 0, done.stderr
    # What the first process asks for alone is its own.
    assert read(tmp_path) == [
        ["secret", "alice", "3", ["x\n", "y\n"]],
        [None, "alice", "3", ["x\n", "y\n"]],
    ]
    assert done.stdout.count("name: ") == 1


def test_the_end_of_input_is_the_same_error_in_all(tmp_path):
    program = "import unisono\ntry:\n    input()\nexcept EOFError:\n    print('nothing there')\n"
    done = run(tmp_path, program, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert "nothing there" in done.stdout


def test_what_only_another_process_asks_for_is_an_error_that_says_so(tmp_path):
    done = run(tmp_path, "import unisono\nif unisono.topology().rank:\n    input()\n", input="1\n")
    assert done.returncode == 1
    assert "EOFError: Rank 1 asked for input at program.py:3, which rank 0 did not" in done.stderr


def test_a_terminal_is_read_too(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    ours, theirs = os.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [*COMMAND, str(tmp_path / "program.py"), str(tmp_path)],
        env=environment(),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=take_terminal,
    )
    try:
        os.close(theirs)
        os.write(ours, b"secret\nalice\n3\nx\n\x04")
        assert process.wait(120) == 0, os.read(ours, 10000).decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert read(tmp_path)[1] == [None, "alice", "3", ["x\n"]]


def test_what_was_printed_before_is_there_after_catching_up():
    output = Output()
    streams = output.open(1)
    expected = ""
    for i in range(200):
        line = f"{i} " * 1000 + "\n"
        os.write(streams.stdout, line.encode())
        assert output.catch_up(10)
        expected += line
        assert output.last_output(1).endswith(expected[-4000:])
    streams.close()
    output.close()


def test_a_reader_that_takes_no_more_text_is_not_waited_for():
    taken = threading.Event()
    output = Output(is_all_shown=True, show=lambda number, data: taken.wait())
    streams = output.open(1)
    os.write(streams.stdout, b"a line\n")
    assert not output.catch_up(0.2)
    taken.set()
    assert output.catch_up(10)
    streams.close()
    output.close()
