"""The worker processes of torch replicas: reused, watched, and ended with their parent."""

import os
import signal
import threading
import time
import traceback

import keras
import numpy as np
import pytest
from scripts import is_alive, private_bytes, start, wait_until_gone, workers_of
from test_many_models import Gan
from twins import BACKEND, TOLERANCE, adopted, apart, fit, rows, sgd, state, trained, twins

import unisono

pytestmark = pytest.mark.skipif(BACKEND != "torch", reason="only torch has a process per replica")

MIB = 2**20


def workers(model):
    return list(vars(model)["_unisono"]._peers._pool.workers)


def pids(model):
    return [worker.pid for worker in workers(model)]


def test_calls_and_models_share_the_workers():
    x, y = rows()
    model = adopted()
    fit(model, x, y)
    first = pids(model)
    assert len(first) == 1
    assert first[0] in workers_of(os.getpid())
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    fit(model, x, y, validation_data=(x, y))
    other = adopted()
    fit(other, x, y)
    assert pids(model) == pids(other) == first


def test_a_batch_goes_to_the_workers_and_no_more():
    """200 MiB of data, of which three batches are used: workers get their rows of those."""
    x = np.zeros((51_200, 1024), "float32")
    y = np.zeros((len(x), 1), "float32")
    model = keras.Sequential([keras.Input((1024,)), keras.layers.Dense(1)])
    unisono.parallel(model, replicas=2).compile("sgd", "mse")
    fit(model, x[:64], y[:64], batch_size=64)
    (pid,) = pids(model)
    in_shm, before = set(os.listdir("/dev/shm")), private_bytes(pid)
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(set(os.listdir("/dev/shm")) - in_shm)
    )
    model.fit(x, y, batch_size=64, steps_per_epoch=3, verbose=0, callbacks=[look])
    assert before > 0
    assert private_bytes(pid) - before < 20 * MIB
    assert seen == [set()] * 3


def test_a_model_without_call_trains_on_all_replicas(monkeypatch):
    gan = Gan()
    gan.built = True
    unisono.parallel(gan, replicas=2).compile(sgd(), sgd())
    sent = []
    pool = vars(gan)["_unisono"]._peers._pool
    send = pool.send
    monkeypatch.setattr(pool, "send", lambda *command: sent.append(command[0]) or send(*command))
    fit(gan, rows()[0], rows(seed=3)[0])
    assert sent.count("step") == 3


class Slow(keras.layers.Layer):
    def call(self, x, training=False):
        if training:
            time.sleep(1.0)
        return x


def test_a_worker_is_killed_in_the_middle_of_a_step():
    x, y = rows()
    hidden = keras.layers.Dense(2)
    model = keras.Sequential([keras.Input((4,)), hidden, Slow(), keras.layers.Dense(1)])
    unisono.parallel(model, replicas=3).compile(sgd(), "mse")
    fit(model, x[:9], y[:9], batch_size=9)
    before, (victim, other) = state(model), workers(model)
    threading.Timer(0.4, os.kill, (victim.pid, signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(unisono.WorkerError) as caught:
        fit(model, x, y)
    assert time.monotonic() - began < 10
    assert str(caught.value).startswith(f"Replica 1 (process {victim.pid}) was ended by SIGKILL.")
    assert "call fit again" in str(caught.value)
    assert not other.is_alive
    assert apart(before, state(model)) == 0
    fit(model, x[:9], y[:9], batch_size=9)
    assert victim.pid not in pids(model)
    assert apart(before, state(model)) > 0


def test_a_worker_is_killed_between_calls():
    x, y = rows()
    model = adopted()
    fit(model, x, y)
    (pid,) = pids(model)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # Its last thread may take a while to end.
    fit(model, x, y)
    assert pids(model) != [pid]
    assert apart(trained(2), state(model)) <= TOLERANCE


def picky():
    """Raises where it sees a marked row, so on one replica only; its classes travel by value."""

    class Marked(Exception):
        pass

    class Picky(keras.layers.Layer):
        def call(self, x):
            if not keras.backend.is_keras_tensor(x) and float(x.max()) > 1e6:
                raise Marked(f"a marked row in process {os.getpid()}")
            return x

    return Marked, lambda: keras.Sequential([keras.Input((4,)), Picky(), keras.layers.Dense(1)])


def test_an_exception_of_one_worker_is_raised_by_its_type():
    x, y = rows(24)
    marked, build = picky()
    expected, model = twins(build, replicas=3)
    for each in (expected, model):
        fit(each, x, y)
    bad, before = x.copy(), pids(model)
    bad[-1] = 1e7
    with pytest.raises(marked, match=str(before[1])) as caught:
        fit(model, bad, y, batch_size=24)
    text = "".join(traceback.format_exception(caught.value))
    assert "Raised in replica 2:" in text
    assert "test_workers.py" in text
    assert "in call" in text
    for each in (expected, model):
        fit(each, x, y)
    assert not set(before) & set(pids(model))
    assert apart(expected, model) <= TOLERANCE


LONG = """
import keras, numpy as np, unisono
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model = unisono.parallel(model, replicas=3)
model.compile("sgd", "mse")
begun = keras.callbacks.LambdaCallback(
    on_train_batch_end=lambda batch, logs: batch == 5 and print("begun", flush=True)
)
x = np.ones((6 * 1000, 4)); y = np.ones((6 * 1000, 1))
model.fit(x, y, batch_size=6, epochs=10**6, verbose=0, callbacks=[begun])
"""


@pytest.fixture
def long_run():
    """A program in the middle of `fit`, and its workers."""
    process = start("-c", LONG)
    try:
        assert "unisono: " in process.stdout.readline()
        assert process.stdout.readline() == "begun\n"
        workers = workers_of(process.pid)
        assert len(workers) == 2
        yield process, workers
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_no_worker_outlives_a_parent_that_was_killed(long_run):
    process, workers = long_run
    process.kill()
    process.wait()
    assert not wait_until_gone(workers, 5)


@pytest.mark.slow
def test_ctrl_c_ends_all(long_run):
    process, workers = long_run
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in err
    assert not wait_until_gone(workers, 5)
    assert not is_alive(process.pid)
