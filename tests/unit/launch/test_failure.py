"""Which failure was the first, and what is told of it."""

import os
import signal

import pytest

from unisono.launch import failure
from unisono.launch.failure import (
    Failure,
    cause_of_code,
    describe,
    first_of,
    last_output,
    signal_name,
    without_ours,
)

TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\nValueError: boom\n'


def failed(kind: str, rank: int = 0) -> Failure:
    return Failure(kind, f"failed by {kind}", rank=rank, host="host h", pid=7)


@pytest.mark.parametrize(
    ("kinds", "first"),
    [
        (["raised", "raised"], 0),
        (["echo", "raised"], 1),
        (["echo", "disagreement"], 1),
        (["disagreement", "raised"], 1),
        (["disagreement", "exit"], 1),
        (["echo", "signal"], 1),
        (["raised", "kill"], 1),
        (["exit", "raised"], 0),
        (["echo", "echo"], 0),
        (["echo", "raised", "node"], 2),
    ],
)
def test_what_has_a_cause_of_its_own_comes_first(kinds, first):
    failures = [failed(kind, rank) for rank, kind in enumerate(kinds)]
    assert first_of(failures) is failures[first]


def test_the_text_ends_with_the_first_failure_and_its_traceback():
    first = Failure(
        "raised", "raised ValueError", 1, 3, 1, "host b", 12, TRACE, "a\nb", "/logs/rank-3.log"
    )
    assert describe([failed("echo"), first], {}, {}) == (
        "[rank 3] a\n"
        "[rank 3] b\n"
        "unisono: rank 3 (process 12 on host b) raised ValueError. "
        "All processes of the run were ended.\n"
        "After it: rank 0 (process 7 on host h) failed by echo\n"
        "All of its output is in /logs/rank-3.log.\n" + TRACE
    )


def test_stacks_come_before():
    names = {1: "rank 1, at “x”", 0: "rank 0"}
    text = describe([failed("stall")], {1: "Thread 1\n  File a", 0: ""}, names)
    assert text.startswith(
        "rank 0:\n(no answer)\n\nrank 1, at “x”:\nThread 1\n  File a\n\nunisono:"
    )


def test_a_failure_travels_as_json():
    first = failed("raised")
    assert Failure.from_message(first.to_message()) == first


@pytest.mark.parametrize(
    ("output", "left"),
    [
        ("a\nb\n" + TRACE, "a\nb"),
        ("a\nb\n" + TRACE[:50], "a\nb"),
        ("a\nTraceb", "a"),
        ("a\nb", "a\nb"),
        (TRACE + "c", TRACE + "c"),
        ("", ""),
    ],
)
def test_a_traceback_is_not_shown_twice(output, left):
    assert last_output(output, TRACE) == left


def test_of_a_long_output_the_end_is_shown():
    assert last_output("\n".join(map(str, range(99))), "", 3) == "96\n97\n98"


def test_threads_and_frames_of_ours_are_left_out():
    bootstrap = failure._OUR_FILE
    stacks = (
        'Thread 0x1 (most recent call first):\n  File "w.py", line 1 in _send_heartbeats\n\n'
        f'Current thread 0x2 (most recent call first):\n  File "x.py", line 2 in <module>\n'
        f'  File "{bootstrap}", line 3 in main'
    )
    assert without_ours(stacks) == (
        'Current thread 0x2 (most recent call first):\n  File "x.py", line 2 in <module>'
    )
    assert os.path.exists(bootstrap)


def test_exit_codes_in_words(monkeypatch):
    assert cause_of_code(3, None) == ("exit", "ended with exit code 3", 3)
    assert cause_of_code(-15, None) == ("signal", "was ended by SIGTERM", 143)
    monkeypatch.setattr(failure, "num_memory_kills", lambda: 1)
    kind, cause, code = cause_of_code(-9, 1)
    assert (kind, code) == ("kill", 137)
    assert "which unisono did not send" in cause
    assert "for want of memory (it has killed" in cause_of_code(-9, 0)[1]
    assert signal_name(signal.SIGRTMIN + 3) == f"signal {signal.SIGRTMIN + 3}"
