"""Nothing of Keras that unisono replaces for a call stays replaced after it."""

import threading

import keras
import pytest
from patches import SAVING, changed, names_of_keras
from twins import adopted, fit, rows

import unisono

_DATA = "keras.src.trainers.data_adapters.get_data_adapter"


class Look(keras.callbacks.Callback):
    """Looks at Keras while a model trains, and may fail."""

    def __init__(self, before, *, fails=False):
        super().__init__()
        self.before = before
        self.fails = fails

    def on_epoch_end(self, epoch, logs=None):
        self.seen = changed(self.before)
        if self.fails:
            raise ZeroDivisionError


def test_keras_is_itself_after_each_call():
    x, y = rows()
    before = names_of_keras()
    model = adopted()
    look = Look(before)
    fit(model, x, y, callbacks=[look])
    assert set(look.seen) <= {_DATA} | SAVING
    assert set(changed(before)) <= SAVING
    with pytest.raises(ZeroDivisionError):
        fit(model, x, y, callbacks=[Look(before, fails=True)])
    assert set(changed(before)) <= SAVING
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    unisono.release(model)
    assert changed(before) == []


def test_scopes_of_two_threads_leave_keras_in_any_order():
    before = names_of_keras()
    strategy = unisono.Strategy(replicas=1)
    is_open, may_close = threading.Event(), threading.Event()

    def hold() -> None:
        with strategy.scope():
            is_open.set()
            may_close.wait(60)

    thread = threading.Thread(target=hold)
    with strategy.scope():
        thread.start()
        assert is_open.wait(60)
    assert changed(before) != []
    may_close.set()
    thread.join(60)
    assert changed(before) == []


def test_horovod_s_shutdown_gives_keras_back():
    import unisono.horovod as hvd

    before = names_of_keras()
    hvd.init()
    hvd.init()
    assert changed(before) != []
    hvd.shutdown()
    assert changed(before) == []
