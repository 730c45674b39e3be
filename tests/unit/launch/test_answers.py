"""What workers tell of their end: the cause comes through, and not its echoes."""

import threading
import time

import cloudpickle
import pytest

from unisono.errors import PeerLostError, WorkerError
from unisono.launch.channel import Channel
from unisono.launch.workers import Workers, collect, is_consequence, send_error

ADVICE = "Do it again."


@pytest.fixture
def workers():
    group = Workers("stand_in_worker", 3, [], [{}] * 3)
    yield group
    group.kill()


def say(workers, rank, kind, value=None):
    """Have a worker tell something, as `answer` and `send_error` do."""
    worker = next(worker for worker in workers if worker.rank == rank)
    worker.channel.send(("echo", kind, cloudpickle.dumps(value), f"traceback of {rank}"))


def end(workers, rank):
    worker = next(worker for worker in workers if worker.rank == rank)
    worker.channel.send(("exit", 7))
    deadline = time.monotonic() + 30
    while worker.is_alive and time.monotonic() < deadline:
        time.sleep(0.01)


def test_results_come_in_the_order_of_ranks(workers):
    for rank in (2, 0, 1):
        say(workers, rank, "result", f"of {rank}")
    assert collect(workers, ADVICE) == ["of 0", "of 1", "of 2"]


def test_an_error_is_raised_as_it_was_with_its_traceback(workers):
    say(workers, 0, "result")
    say(workers, 2, "error", KeyError("a marker"))
    with pytest.raises(KeyError, match="a marker") as caught:
        collect(workers, ADVICE)
    assert "Raised in replica 2:\ntraceback of 2" in caught.value.__notes__[0]


def test_the_cause_may_come_after_its_echoes(workers):
    say(workers, 0, "lost")
    threading.Timer(0.5, say, (workers, 1, "error", KeyError("a marker"))).start()
    with pytest.raises(KeyError, match="a marker"):
        collect(workers, ADVICE)


def test_who_ended_without_a_word_is_the_cause_of_what_others_raise(workers):
    end(workers, 1)
    say(workers, 0, "error", RuntimeError("as some frameworks raise when a peer is gone"))
    say(workers, 2, "lost")
    with pytest.raises(WorkerError, match=r"(?s)Replica 1 .* exited with code 7.*Do it again"):
        collect(workers, ADVICE)


def test_an_echo_may_come_before_its_process_is_seen_to_end(workers):
    say(workers, 0, "lost")
    say(workers, 2, "lost")
    threading.Timer(0.5, end, (workers, 1)).start()
    with pytest.raises(WorkerError, match=r"Replica 1 .* exited with code 7"):
        collect(workers, ADVICE)


def test_one_that_ends_while_nobody_says_anything(workers):
    end(workers, 2)
    with pytest.raises(WorkerError, match=r"Replica 2 .* exited with code 7"):
        collect(workers, ADVICE)


def test_an_exception_that_cannot_be_sent(workers):
    ours, theirs = Channel.pair()

    class Own(Exception):
        def __reduce__(self):
            raise TypeError

    send_error(Channel(theirs), Own("a marker"))
    kind, data, text = ours.receive()
    assert (kind, data) == ("error", None)
    assert "a marker" in text
    ours.close()
    theirs.close()
    for worker in workers:
        worker.channel.send(("echo", kind, data, text))
    with pytest.raises(WorkerError, match="its traceback follows") as caught:
        collect(workers, ADVICE)
    assert "a marker" in caught.value.__notes__[0]


def test_an_echo_is_known_by_what_caused_it():
    wrapped = ValueError("while saving")
    wrapped.__cause__ = PeerLostError("gone")
    assert is_consequence(wrapped)
    assert not is_consequence(ValueError("its own"))
