"""The process in which `unisono verify` runs a program: `python child.py SCRIPT [arguments]`.

`recorded` is also what the processes of a run, and those of `unisono.spawn`, run their program in:
it records them if the variable of `unisono verify` is set, and else does nothing.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.pop(0)  # Our own folder: not a place where the program's imports are to be found.

import contextlib
import json
import os
from collections.abc import Iterator


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Record the program that runs inside, if this process was started to."""
    text = os.environ.get("UNISONO_VERIFY")
    if not text:
        yield
        return
    from unisono.verify.record import ProgramRecorder
    from unisono.verify.records import RecordSettings

    with ProgramRecorder(RecordSettings(**json.loads(text))).recording():
        yield


def main() -> None:
    import unisono  # noqa: F401
    from unisono.launch.program import run_program

    with recorded():
        run_program(sys.argv[1:])


if __name__ == "__main__":
    main()
