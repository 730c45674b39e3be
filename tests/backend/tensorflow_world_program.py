"""A program for several processes: what TensorFlow's part of a run promises, check by check.

Each process prints, as its last line, what its checks returned, as JSON.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import unisono
from unisono.backends.tensorflow.collectives import TensorFlowCollectives
from unisono.backends.tensorflow.distributed import group_of

RANK = unisono.topology().rank
SIZE = unisono.topology().world_size
DTYPES = "float16 bfloat16 float32 float64 int8 uint8 int16 int32 int64 bool".split()  # noqa: SIM905


def plain(value: Any) -> Any:
    """Tensors as numbers, in any structure."""
    return keras.tree.map_structure(lambda t: np.asarray(tf.cast(t, "float64")).tolist(), value)


def collectives_of(call: Callable[..., Any], dtype: str) -> dict[str, Any]:
    """Every collective, on tensors of one type; `call(function, tensor)` calls the function."""
    every = TensorFlowCollectives(group_of())
    x = tf.cast(tf.constant([[1, 0, 3], [2, 1, 0]]) + RANK, dtype)
    rows = tf.cast(tf.reshape(tf.range(2 * (RANK + 1)), [-1, 2]) % 2 + RANK, dtype)
    sent = tf.cast(tf.fill([sum(range(RANK, RANK + SIZE)), 2], RANK), dtype)
    splits = [RANK + other for other in range(SIZE)]
    long = tf.cast(tf.fill([2 * SIZE + 1, 3], RANK), dtype)
    found = {
        op: plain(call(lambda t, op=op: every.all_reduce([t], op)[0], x))
        for op in ("sum", "min", "max", "product")
    }
    found["gather"] = plain(call(every.all_gather, rows))
    found["broadcast"] = plain(call(lambda t: every.broadcast([t, t[:0], t[0, 0]], 1), x))
    found["reduce_scatter"] = plain(call(lambda t: every.reduce_scatter(t, "sum"), long))
    found["all_to_all"] = plain(call(lambda t: every.all_to_all(t, splits), sent))
    return found


def eager() -> Any:
    return {dtype: collectives_of(lambda f, x: f(x), dtype) for dtype in DTYPES}


def in_functions() -> Any:
    return {
        dtype: collectives_of(lambda f, x: tf.function(f)(x), dtype)
        for dtype in ("float32", "bool", "bfloat16")
    }


def in_functions_of_any_shape() -> Any:
    def call(function: Any, x: Any) -> Any:
        spec = tf.TensorSpec([None] * x.shape.rank, x.dtype)
        return tf.function(function, input_signature=[spec])(x)

    return {dtype: collectives_of(call, dtype) for dtype in ("float32", "int64")}


def scalars() -> Any:
    every = TensorFlowCollectives(group_of())
    every.barrier()
    return plain([every.all_gather(tf.constant(RANK)), every.all_reduce([tf.constant(2.0)], "sum")])


def broadcasts() -> Any:
    """Of one length, from each process in turn, and again in the other order."""
    roots = [*range(SIZE), *reversed(range(SIZE))]
    return [plain(group_of().broadcast([tf.fill([3], RANK)], root)[0]) for root in roots]


def functions_in_functions() -> Any:
    """Collectives of a function that is called twice, of its caller, in a loop and in a branch."""

    def total(x: Any) -> Any:
        return group_of().all_reduce([x])[0]

    @tf.function
    def inner(x: Any) -> Any:
        return total(total(x) + 1.0)

    @tf.function
    def outer(x: Any) -> Any:
        first, second = inner(x), inner(10.0 * x)
        looped = x
        for _ in tf.range(3):
            looped = total(looped) / SIZE
        branch = tf.cond(tf.reduce_sum(x) > 0.0, lambda: total(x), lambda: x)
        return first, second, looped, branch, total(x)

    # Traced more often in one process than elsewhere, which must not matter.
    (tf.function(inner.python_function) if RANK == 1 else inner)(tf.ones([1]))
    return [plain(outer(tf.constant([1.0 + RANK]))) for _ in range(2)]


def some_processes() -> Any:
    if RANK == 0:
        return None
    some = TensorFlowCollectives(group_of(tuple(range(1, SIZE))))
    return [some.rank, some.size, plain(some.all_gather(tf.fill([RANK], RANK)))]


def net(*layers: Any) -> Any:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(2)])
    return unisono.parallel(model)


def one_trace() -> Any:
    """How often a step is traced for batches of many sizes."""
    model = net()
    num_traces = 0

    class Loss(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            nonlocal num_traces
            num_traces += not tf.executing_eagerly()
            return keras.ops.mean((y_true - y_pred) ** 2, axis=-1)

    model.compile("sgd", Loss())
    x, y = np.ones((29, 6), "float32"), np.ones((29, 2), "float32")
    model.fit(x, y, batch_size=8, verbose=0)
    model.train_on_batch(x[:3], y[:3])
    before = num_traces
    for count in (29, 17, 5, 1, 2, 28):
        model.train_on_batch(x[:count], y[:count])
    model.fit(x, y, batch_size=7, steps_per_epoch=3, verbose=0)
    return [before > 0, num_traces - before]


class Draws(keras.layers.Layer):
    """Gives out what it draws without a seed."""

    def call(self, inputs: Any) -> Any:
        return inputs * 0.0 + keras.random.normal(keras.ops.shape(inputs))


def unseeded() -> Any:
    """What the rows of two batches got, drawn by all processes."""
    keras.utils.set_random_seed(3)
    model = unisono.parallel(keras.Sequential([keras.Input((6,)), Draws()]))
    return model.predict(np.ones((8, 6)), batch_size=4, verbose=0).ravel().tolist()


def sparse_and_ragged() -> Any:
    """Batches of tf.data that cannot be indexed, or whose rows have any length."""
    x = np.arange(12.0, dtype="float32").reshape(6, 2)
    kinds = {"sparse": tf.sparse.from_dense(x), "ragged": tf.RaggedTensor.from_tensor(x)}
    return {
        kind: net_of_sums().predict(tf.data.Dataset.from_tensors(rows), verbose=0).ravel().tolist()
        for kind, rows in kinds.items()
    }


def net_of_sums() -> Any:
    class Sums(keras.Model):
        def call(self, inputs: Any) -> Any:
            is_sparse = isinstance(inputs, tf.SparseTensor)
            dense = tf.sparse.to_dense(inputs) if is_sparse else inputs.to_tensor()
            return tf.reduce_sum(dense, 1, keepdims=True)

    return unisono.parallel(Sums())


class Probe(keras.layers.Layer):
    """Keeps what passes through it in a step that runs eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def call(self, x: Any) -> Any:
        if tf.executing_eagerly():
            self.seen.append(x.numpy().tolist())
        return x


def masks() -> Any:
    """What dropout leaves of ones, in two steps."""
    probe = Probe()
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dropout(0.5), probe, keras.layers.Dense(1)]
    )
    model = unisono.parallel(model)
    model.compile("sgd", "mse", run_eagerly=True)
    for _ in range(2):
        model.train_on_batch(np.ones((2 * SIZE, 8)), np.ones((2 * SIZE, 1)))
    return probe.seen


def order() -> Any:
    """The rows that this process got in two epochs, without a seed and with one, each twice."""
    return [_epochs(seed) for seed in (None, None, 5, 5)]


def _epochs(seed: int | None) -> Any:
    if seed is not None:
        keras.utils.set_random_seed(seed)
    probe = Probe()
    model = keras.Sequential([keras.Input((1,)), probe, keras.layers.Dense(1)])
    model = unisono.parallel(model)
    model.compile("sgd", "mse", run_eagerly=True)
    x = np.arange(13, dtype="float32")[:, None]
    model.fit(x, x, batch_size=5, epochs=2, verbose=0)
    rows = [[int(row[0]) for row in batch] for batch in probe.seen]
    return [[row for batch in epoch for row in batch] for epoch in (rows[:3], rows[3:])]


def writes() -> Any:
    """What a program may write between steps, noticed whatever method it uses."""
    model = net()
    model.compile(keras.optimizers.SGD(0.0), "mse")
    x, y = np.ones((8, 6), "float32"), np.ones((8, 2), "float32")
    model.train_on_batch(x, y)
    kernel = model.layers[0].kernel
    found = []
    for write in (
        lambda: kernel.assign(keras.ops.ones(kernel.shape)),
        lambda: kernel.value.assign_add(tf.ones(kernel.shape)),
        lambda: kernel.value.scatter_nd_update([[0, 0]], [7.0]),
        lambda: model.set_weights([np.full((6, 2), 4.0), np.zeros(2)]),
    ):
        if RANK == 0:
            write()
        model.train_on_batch(x, y)
        found.append(float(tf.reduce_sum(kernel.value)))
    return found


def variables_are_plain() -> Any:
    """Values can be read, used and saved in one process alone; nobody waits."""
    model = net()
    model.compile("adam", "mse")
    model.train_on_batch(np.ones((8, 6)), np.ones((8, 2)))
    if RANK == 1:
        model(np.ones((3, 6)))
        tf.function(lambda: model.layers[0].kernel * 2.0)()
        keras.models.clone_model(model)
    unisono.release(model)
    return type(model.layers[0].kernel.value).__name__


def export() -> Any:
    """A plain model of the weights of a parallel one gives what that gives."""
    model = net()
    model.compile("adam", "mse")
    x = np.ones((5, 6), "float32")
    model.fit(x, np.ones((5, 2)), verbose=0)
    together = model.predict(x, verbose=0)
    return float(np.abs(together - np.asarray(model(x))).max())


def loses_a_process(how: str) -> Any:
    model = net()
    model.compile("sgd", "mse")
    x, y = np.ones((64, 6), "float32"), np.ones((64, 2), "float32")
    model.fit(x, y, batch_size=8, verbose=0)
    began = time.monotonic()
    if RANK == 1:
        if how == "stays away":
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if how == "stays away":
            group_of().all_reduce([tf.ones([3])])
        model.fit(x, y, batch_size=8, verbose=0)
    except unisono.errors.PeerLostError as error:
        print(json.dumps([str(error), time.monotonic() - began]), flush=True)
    os._exit(0)


CHECKS = (
    eager,
    in_functions,
    in_functions_of_any_shape,
    scalars,
    broadcasts,
    functions_in_functions,
    some_processes,
    order,
    one_trace,
    masks,
    unseeded,
    sparse_and_ragged,
    writes,
    variables_are_plain,
    export,
)


if __name__ == "__main__":
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    if len(sys.argv) > 1:
        loses_a_process(sys.argv[1])
    found = {}
    for check in CHECKS:
        print(check.__name__, time.process_time(), file=sys.stderr, flush=True)
        found[check.__name__] = check()
    print(json.dumps(found), flush=True)
