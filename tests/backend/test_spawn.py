"""A function runs in one fresh process per replica, and what each returns or raises comes back."""

import os
import signal
import threading
import time

import keras
import numpy as np
import pytest
from scripts import is_alive, run
from twins import TOLERANCE, apart, mlp, plain, rows, sgd, state

import unisono
from unisono.launch.client import current_world


def in_a_run(word, *, number):
    facts = unisono.topology()
    print("printed by a replica")
    return word, number, facts.rank, facts.world_size, facts.is_chief, os.getpid()


def test_each_process_is_a_rank_and_the_first_ones_output_is_shown(capfd):
    found = unisono.spawn(in_a_run, ("a",), {"number": 2}, replicas=3)
    assert [line[:5] for line in found] == [("a", 2, rank, 3, rank == 0) for rank in range(3)]
    pids = {line[5] for line in found}
    assert len(pids) == 3
    assert os.getpid() not in pids
    assert not any(map(is_alive, pids))
    assert capfd.readouterr().out.count("printed by a replica") == 1
    assert unisono.topology().world_size == 1


def trained():
    keras.utils.set_random_seed(unisono.topology().rank)
    model = mlp()
    model.compile(sgd(), "mse")
    unisono.parallel(model)
    before = state(model)
    model.fit(*rows(), batch_size=8, epochs=2, shuffle=False, verbose=0)
    return before, state(model)


def test_a_model_trains_on_all_of_them():
    found = unisono.spawn(trained, replicas=2)
    model = plain()
    model.set_weights(found[0][0][: len(model.weights)])
    model.fit(*rows(), batch_size=8, epochs=2, shuffle=False, verbose=0)
    for _, after in found:  # They were made from different seeds, and begin as the first one.
        assert apart(state(model), after) <= TOLERANCE


def drawn():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    return np.random.rand(), keras.ops.convert_to_numpy(model.layers[0].kernel)


def test_all_begin_from_one_seed():
    (first, weights), *others = unisono.spawn(drawn, replicas=2)
    for number, same in others:
        assert number == first
        assert (same == weights).all()


def fails_on_the_second(marker):
    if unisono.topology().rank == 1:
        raise LookupError(marker)
    current_world().all_gather("the others", None)


def test_an_exception_is_raised_here_and_not_its_echo():
    with pytest.raises(LookupError, match="a marker") as caught:
        unisono.spawn(fails_on_the_second, ("a marker",), replicas=3)
    assert "Raised in replica 1" in "".join(caught.value.__notes__)


def is_killed():
    if unisono.topology().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    current_world().all_gather("the others", None)


def test_a_process_that_is_killed():
    began = time.monotonic()
    with pytest.raises(
        unisono.WorkerError, match=r"Replica 1 \(process \d+\) was ended by SIGKILL"
    ):
        unisono.spawn(is_killed, replicas=2)
    assert time.monotonic() - began < 60


def leaves_early():
    if unisono.topology().rank == 0:
        current_world().all_gather("the others", None)


def test_a_function_that_returns_while_another_waits():
    with pytest.raises(unisono.errors.DisagreementError, match="Rank 1 has ended its program"):
        unisono.spawn(leaves_early, replicas=2)


def spawns_again():
    return unisono.spawn(print, replicas=2)


def test_spawning_in_a_spawned_process():
    with pytest.raises(unisono.errors.StrategyError, match="from a program that runs alone"):
        unisono.spawn(spawns_again, replicas=2)


def test_what_cannot_be_sent_to_another_process():
    with pytest.raises(unisono.errors.StrategyError, match="cannot be sent"):
        unisono.spawn(print, (threading.Lock(),), replicas=2)


PROGRAM = """
import unisono
numbers = [5, 7]
class Own:
    def __init__(self, rank): self.rank = rank
def function():
    return Own(unisono.topology().rank + numbers[0])
print([own.rank for own in unisono.spawn(function, replicas=2)])
"""


def test_a_program_without_a_file_or_a_guard():
    """As in a notebook: what the function needs is nowhere to be imported from."""
    done = run("-", text=PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[5, 6]"
