"""A training program for the tests of `unisono verify`: `verify_program.py HOW`."""

import sys

import keras
import numpy as np

import unisono

how = sys.argv[1]
if how == "fail":
    raise ValueError("no data here")
if how == "leave":
    sys.exit(0)

draw = np.random.default_rng(None if how == "unseeded" else 0)
x = draw.normal(size=(96, 6)).astype("float32")
y = draw.integers(0, 3, 96)
strategy = unisono.Strategy(replicas=4)
facts = unisono.topology()
if how == "by process":
    x, y = x[facts.rank :: facts.world_size], y[facts.rank :: facts.world_size]
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)], name="net"
    )
    factor = strategy.num_replicas_in_sync if how == "rate" else 1
    model.compile(
        keras.optimizers.SGD(0.05 * factor, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
batch_size = 12 * (strategy.num_replicas_in_sync if how == "batch" else 2)
model.fit(x, y, batch_size=batch_size, epochs=50, verbose=0)
