"""Training looks for unused memory, where its process keeps what it freed."""

import sys
import time

import keras
import numpy as np
import pytest

import unisono
from unisono.devices.host_memory import Unused
from unisono.replication import memory_watch


@pytest.mark.parametrize("keeps", [True, False])
def test_each_step_looks(monkeypatch, keeps):
    looks = []
    monkeypatch.setattr(memory_watch, "_EVERY_S", 0.0)
    monkeypatch.setattr(Unused, "give_back", lambda self: looks.append(self))
    # The module, whose name the call of the same name hides.
    room = sys.modules[unisono.parallel.__module__]
    monkeypatch.setattr(room, "is_kept", lambda env: keeps)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model = unisono.parallel(model, replicas=1)
    model.compile("sgd", "mse")
    model.fit(np.ones((12, 4)), np.ones((12, 1)), batch_size=4, epochs=2, verbose=0)
    assert len(looks) == (6 if keeps else 0)
    assert len(set(map(id, looks))) == keeps


def test_of_short_steps_few_look(monkeypatch):
    looks = []
    monkeypatch.setattr(Unused, "give_back", lambda self: looks.append(self))
    watch = memory_watch.GiveBack()
    for _ in range(100):
        assert watch.before(("state", "data")) == ("state", "data")
    assert len(looks) < 50


def test_the_watch_of_a_long_step_looks_often_until_it_is_over(monkeypatch):
    looks = []

    class Looks:
        def keep_peak(self):
            looks.append(time.monotonic())

    monkeypatch.setattr(memory_watch, "Unused", Looks)
    watch = memory_watch.PeakWatch()
    time.sleep(0.1)
    assert not looks
    for _ in range(2):
        looks.clear()
        watch.begin(0.3)
        end = time.monotonic() + 0.3
        time.sleep(0.5)
        assert len(looks) > 2
        assert looks[-1] < end + 0.02
