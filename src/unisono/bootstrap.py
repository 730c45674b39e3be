"""What a process of `unisono run` does before and after the user's program.

Run as a file, by its path: the process is pinned to its cores and tied to its launcher before
anything that counts cores is imported. Then unisono joins the run, applies the policy for memory
and threads and makes old names work if requested, and the program runs as `__main__`, just as
Python itself would run it. What it raises is reported to the launcher before the process ends. Not
in `launch`, which never imports a backend.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.pop(0)  # Our own folder: not a place where the program's imports are to be found.

import contextlib
import faulthandler
import importlib.util
import json
import os
import signal
import socket
import threading
import traceback
import types
from typing import Any

_MOST_CHARACTERS = 100_000
_LEGACY = "UNISONO_LEGACY"
_CONSEQUENCES = {"PeerLost", "PeerLostError"}
_RUNNER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "launch", "program.py")
_LEADING = (__file__, _RUNNER, "<frozen runpy>")


def main() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # A preemption, until it is handled.
    line_file, dump_file, dump_signal, cores, *program = sys.argv[1:]
    for stream in (sys.stdout, sys.stderr):
        # Whole lines at once, so that those of several processes do not mix; and no later.
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    if cores != "-":
        os.sched_setaffinity(0, map(int, cores.split(",")))
    line = socket.socket(fileno=int(line_file))
    line.set_inheritable(False)
    threading.Thread(target=_end_with_launcher, args=(line,), daemon=True).start()
    _show_stacks_on(int(dump_signal), int(dump_file))
    try:
        _join()
        _run(program)
    except SystemExit as end:
        end.__traceback__ = _own_part(end.__traceback__)
        code = _code(end)
        if _has_name(end, {"Preempted"}):
            _send(line, {"kind": "preempted"})
        elif code:
            _report(line, end, code)
        else:
            _send(line, {"kind": "ended"})
        raise
    except BaseException as error:
        error.__traceback__ = _own_part(error.__traceback__)
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        _report(line, error, code)
        _show(error)
        sys.exit(code)
    _send(line, {"kind": "ended"})


def _end_with_launcher(line: socket.socket) -> None:
    """Wait for the other end to be closed, which is all that ever happens on it."""
    with contextlib.suppress(OSError):
        line.recv(1)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # With all processes that the program has started.
    os._exit(1)


def _show_stacks_on(number: int, file: int) -> None:
    os.set_inheritable(file, False)
    faulthandler.enable(file, all_threads=True)
    faulthandler.register(number, file, all_threads=True)


def _join() -> None:
    if importlib.util.find_spec("unisono") is None:  # The launcher was found in another way.
        sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import unisono
    from unisono.backends.settings import apply_policy
    from unisono.devices import Policy
    from unisono.launch.client import current_world
    from unisono.launch.streams import SharedInput

    if (policy := Policy.from_environment()) != Policy():
        apply_policy(policy, Policy())
    if (world := current_world()) is not None and sys.stdin is not None:
        sys.stdin = SharedInput(sys.stdin, world)
    # Taken out: what the program starts has not asked for it.
    if os.environ.pop(_LEGACY, None):
        import unisono.compat.legacy  # noqa: F401


def _run(program: list[str]) -> None:
    from unisono.launch.program import run_program
    from unisono.verify.child import recorded

    with recorded():
        run_program(program)


def _code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    return end.code & 0xFF if isinstance(end.code, int) else 1


def _report(line: socket.socket, error: BaseException, code: int) -> None:
    """Report what ends this process to the launcher, which informs the other processes."""
    world = sys.modules.get("unisono.launch.client")
    if world is not None and (here := world.current_world()) is not None:
        here.abandon()
    text = "".join(traceback.format_exception(error))
    message = {"kind": _kind(error), "error": type(error).__name__, "code": code}
    _send(line, {**message, "traceback": text[-_MOST_CHARACTERS:]})


def _show(error: BaseException) -> None:
    if _is_consequence(error) and sys.excepthook is sys.__excepthook__:
        # Where it was raised does not matter: the launcher prints the traceback of the cause.
        print(*traceback.format_exception_only(error), sep="", end="", file=sys.stderr)
    else:
        sys.excepthook(type(error), error, error.__traceback__)


def _kind(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "exit"
    if _is_consequence(error):
        return "echo"
    return "disagreement" if _has_name(error, {"DisagreementError"}) else "raised"


def _send(line: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # No launcher any more, and soon no process.
        line.sendall(json.dumps(message).encode() + b"\n")


def _is_consequence(error: BaseException) -> bool:
    """Whether this error is a consequence of another process' end."""
    seen: BaseException | None = error
    while seen is not None:
        if getattr(seen, "is_echo", False) or _has_name(seen, _CONSEQUENCES):
            return True
        seen = seen.__cause__
    return False


def _has_name(error: BaseException, names: set[str]) -> bool:
    return any(kind.__name__ in names for kind in type(error).__mro__)


def _own_part(trace: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without the frames that only led to the program."""
    kept = trace
    while kept is not None and kept.tb_frame.f_code.co_filename in _LEADING:
        kept = kept.tb_next
    return kept or trace


if __name__ == "__main__":
    main()
