"""What the tests of the launcher run: a program without a framework that meets, and misbehaves.

`run_script.py FOLDER HOW` writes its process' number to FOLDER, meets the others, and then rank 1
does what HOW says, while the others wait for it.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import unisono
from unisono.launch.client import current_world

folder, how, *_ = sys.argv[1:]
facts = unisono.topology()
world = current_world()


def note(name: str, text: object) -> None:
    """Write a file at once: a reader sees all of it or none."""
    draft = Path(folder, f".{name}-{os.getpid()}")
    draft.write_text(str(text))
    draft.rename(Path(folder, name))


def sleep_in_c(holds_lock: bool) -> None:
    library = ctypes.PyDLL(None) if holds_lock else ctypes.CDLL(None)
    while True:
        library.sleep(1000)


def misbehave() -> None:
    if how == "raise":
        raise ValueError("boom")
    if how.startswith("exit"):
        sys.exit(int(how[4:]))
    if how == "say and exit":
        sys.exit("no data")
    if how == "leave at once":
        os._exit(0)
    if how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
    if how == "crash":
        ctypes.string_at(0)
    if how == "loop":
        while True:
            time.sleep(0.01)
    if how == "sleep in C":
        sleep_in_c(holds_lock=False)
    if how == "hold the lock":
        sleep_in_c(holds_lock=True)
    if how == "take memory":
        bytearray(1 << 31)[::4096] = b"x" * (1 << 19)


note(f"pid-{facts.rank}", os.getpid())
print(f"rank {facts.rank} of {facts.world_size} is here")
print(f"a word to stderr of rank {facts.rank}", file=sys.stderr)
if how == "start others":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    note(f"pid-child-{facts.rank}", child.pid)
if how in ("ignore TERM", "sleep in C", "hold the lock"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if world is not None:
    world.all_gather("the first point", facts.rank)
note(f"ready-{facts.rank}", "")
if facts.rank == min(1, facts.world_size - 1):
    misbehave()
if how in ("sleep", "ignore TERM", "start others"):
    time.sleep(100)
if world is not None:
    print(world.all_gather("the last point", facts.rank))
