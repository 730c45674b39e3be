"""Ctrl-C is held back where a model has no values, and never lost."""

import os
import signal
import threading

import pytest

from unisono.replication.interrupts import interrupts_held_back


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_is_delivered_at_the_end():
    steps = []

    def work():
        with interrupts_held_back():
            interrupt()
            steps.append("the rest of the block")
        steps.append("what follows")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["the rest of the block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_is_delivered_at_once():
    steps = []

    def work():
        with interrupts_held_back():
            interrupt()
            interrupt()
            steps.append("the rest of the block")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_block_is_kept():
    with pytest.raises(ValueError, match="own"), interrupts_held_back():
        raise ValueError("own")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_program_is_called_once():
    calls = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with interrupts_held_back():
            interrupt()
            assert calls == []
        assert calls == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_program_that_ignores_interrupts_is_left_alone():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_held_back():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_have_no_say():
    done = []

    def work():
        with interrupts_held_back():
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.default_int_handler]
