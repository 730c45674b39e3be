"""Threads that wait for their turn: those that are started inside, and no others."""

import os
import sys
import threading

import pytest

from unisono.devices.gloo_threads import patient_threads


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such threads")
def test_threads_that_are_started_inside_are_patient():
    end = threading.Event()
    before, inside, after = (threading.Thread(target=end.wait) for _ in range(3))
    before.start()
    with patient_threads():
        inside.start()
    after.start()
    try:
        policies = [os.sched_getscheduler(each.native_id) for each in (before, inside, after)]
        own = os.sched_getscheduler(0)
    finally:
        end.set()
        for each in (before, inside, after):
            each.join()
    assert policies == [own, os.SCHED_BATCH, own]
