"""How long a launcher lets its processes save their work after a first Ctrl-C."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import FOREIGN, NAMES, PATIENCE_S, wait_for

PROGRAM = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
try:
    (folder / "ready").touch()
    time.sleep(100)
except KeyboardInterrupt:
    time.sleep(1.5)
    (folder / "saved").touch()
"""
LAUNCH = """
import sys
from unisono.launch.launcher import start
from unisono.launch.request import Request
program, folder, seconds = sys.argv[1:]
sys.exit(start(Request(program=(program, folder), num_processes=1, interrupt_s=float(seconds))))
"""


@pytest.mark.parametrize(("seconds", "is_saved"), [("0.2", False), ("60", True)])
def test_processes_have_as_long_as_was_asked_for(tmp_path: Path, seconds, is_saved):
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN) and k not in NAMES}
    words = [str(tmp_path / "program.py"), str(tmp_path), seconds]
    process = subprocess.Popen([sys.executable, "-c", LAUNCH, *words], env=env)
    try:
        wait_for(tmp_path, "ready")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGINT
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "saved").exists() == is_saved
