"""The small net that is bound by overhead, trained in one of several ways, a pass at a time.

    python -m unisono.bench.mnist_cnn WAY GLOBAL_BATCH NUM_BATCHES

Run by `unisono.bench.overhead`: prints "ready" after a warm-up, then for each line read from
standard input trains one pass and prints its images per second.
"""

import atexit
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from unisono.scratch import Scratch

WAYS = ("plain", "one", "two", "own")


def main(way: str, global_batch: int, num_batches: int) -> None:
    import keras

    import unisono

    rng = np.random.default_rng(0)
    x = rng.random((global_batch * num_batches, 28, 28, 1), dtype=np.float32)
    y = rng.integers(0, 10, len(x))
    keras.utils.set_random_seed(0)
    if way == "own":
        fit = _OWN_WAYS[keras.backend.backend()](x, y, global_batch)
    else:
        model = build()
        if way != "plain":
            model = unisono.parallel(model, replicas={"one": 1, "two": 2}[way])
        fit = _fit(model, x, y, global_batch)
    fit()
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        fit()
        print(len(x) / (time.perf_counter() - start), flush=True)


def build() -> Any:
    import keras
    from keras import layers

    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, metrics=["accuracy"])
    return model


def _fit(model: Any, x: Any, y: Any, batch: int) -> Callable[[], Any]:
    return lambda: model.fit(x, y, batch_size=batch, epochs=1, verbose=0)


def _own_jax(x: Any, y: Any, global_batch: int) -> Callable[[], Any]:
    """keras.distribution, on two virtual CPU devices."""
    import jax
    import keras

    jax.config.update("jax_num_cpu_devices", 2)
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    return _fit(build(), x, y, global_batch)


def _own_tensorflow(x: Any, y: Any, global_batch: int) -> Callable[[], Any]:
    """tf.distribute.MirroredStrategy, on two of the virtual CPU devices."""
    import tensorflow as tf

    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = build()
    return _fit(model, x, y, global_batch)


def _own_torch(x: Any, y: Any, global_batch: int) -> Callable[[], Any]:
    """Two processes with a thread each; gradients are averaged in `optimizer.apply`."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ.get("RANK", "0"))
    store = os.environ.setdefault("BENCH_STORE", os.path.join(_new_folder(), "store"))
    if rank == 0:
        env = {**os.environ, "RANK": "1"}
        num_batches = len(x) // global_batch
        arguments = ["own", str(global_batch), str(num_batches)]
        # Its standard input is a pipe that we write a line to at each pass.
        peer = subprocess.Popen(
            [sys.executable, "-m", "unisono.bench.mnist_cnn", *arguments],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = build()
    apply = model.optimizer.apply

    def average_then_apply(grads: Any, trainable_variables: Any = None) -> Any:
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat)
        parts = (flat / 2).split([g.numel() for g in grads])
        grads = [p.view(g.shape) for p, g in zip(parts, grads, strict=True)]
        return apply(grads, trainable_variables)

    model.optimizer.apply = average_then_apply
    half = _fit(model, x[rank::2], y[rank::2], global_batch // 2)
    is_first = True

    def both() -> None:
        nonlocal is_first
        if rank == 0 and not is_first:
            assert peer.stdin is not None
            print("go", file=peer.stdin, flush=True)
        is_first = False
        half()

    return both


def _new_folder() -> str:
    scratch = Scratch("unisono-bench-")
    atexit.register(scratch.close)
    return str(scratch.path)


_OWN_WAYS = {"jax": _own_jax, "tensorflow": _own_tensorflow, "torch": _own_torch}

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
