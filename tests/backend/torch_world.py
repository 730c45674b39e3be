"""What the processes of test_torch_world compute."""

import os
import socket
import struct
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch
from twins import mlp, rows, sgd, state

import unisono
from unisono.backends import load_backend

DTYPES = ("float16", "float32", "float64", "bfloat16", "uint8", "int8", "int16", "int32", "int64")
OPS = ("sum", "min", "max", "product")


def rank() -> int:
    return unisono.topology().rank


def found_by_each() -> dict[str, Any]:
    """All of it in one run, which takes long to start."""
    parts = (reduced, broadcast, listening, frozen, random, unbuilt, small_batches, summed, probed)
    return {part.__name__: part() for part in parts}


def collectives() -> Any:
    return load_backend("torch").collectives()


def plain(value: Any) -> Any:
    """What can be compared and pickled."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(part) for part in value]


# -- collectives ----------------------------------------------------------------------------------


def reduced() -> dict[Any, Any]:
    every = collectives()
    results = {}
    for op in OPS:
        own = [torch.tensor([rank() + 1, 3], dtype=getattr(torch, name)) for name in DTYPES]
        totals = every.all_reduce([*own, torch.tensor(2.0 + rank())], op)
        assert [t.dtype for t in totals] == [*(o.dtype for o in own), torch.float32]
        results[op] = plain(totals)
        truths = every.all_reduce([torch.tensor([True, rank() == 1, False])], op)
        results[op, "bool"] = plain(truths)
    transposed = torch.arange(6.0).view(2, 3).T
    results["transposed"] = plain(every.all_reduce([transposed, torch.empty(0, 4)], "sum"))
    return results


def broadcast() -> list[Any]:
    own = [torch.full((2,), rank(), dtype=getattr(torch, name)) for name in (*DTYPES, "bool")]
    found = collectives().broadcast([*own, torch.tensor(float(rank())), torch.eye(2)[:, :1]], 1)
    assert plain(own[0]) == [rank(), rank()]
    return plain(found)


def listening() -> list[str]:
    """The addresses at which this process listens."""
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, status, *rest = line.split()
        if status == "0A" and f"socket:[{rest[5]}]" in own:
            number = int(local.split(":")[0], 16)
            found.append(socket.inet_ntoa(struct.pack("=I", number)))
    everywhere = Path("/proc/net/tcp6").read_text().splitlines()[1:]
    found += ["::" for line in everywhere if f"socket:[{line.split()[9]}]" in own]
    return found


# -- models ---------------------------------------------------------------------------------------


def made(build: Any = mlp, **options: Any) -> Any:
    keras.utils.set_random_seed(rank() + 5)
    model = build()
    model.compile(**{"optimizer": sgd(), "loss": "mse", **options})
    return model


def step(model: Any) -> None:
    x, y = rows(8)
    model.train_on_batch(x, y)


def frozen() -> list[bool]:
    """What the chief freezes between steps is frozen everywhere."""
    model = made()
    unisono.parallel(model)
    step(model)
    if rank() == 0:
        model.layers[0].bias.trainable = False
    step(model)
    return [variable.trainable for variable in model.weights]


class Noise(keras.layers.Layer):
    """Adds what torch's own generator draws."""

    drawn: Any = None

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.drawn = torch.rand(3)
        return x


def random() -> dict[str, Any]:
    noise, dropout = Noise(), keras.layers.Dropout(0.5)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), noise, dropout, keras.layers.Dense(1)])
    model.compile(sgd(), "mse")
    unisono.parallel(model)
    before = torch.get_rng_state()
    drawn = []
    for _ in range(2):
        step(model)
        drawn.append(plain(noise.drawn))
    return {
        "in steps": drawn,
        "is outside the same": bool(torch.equal(before, torch.get_rng_state())),
        "outside": plain(torch.rand(2)),
        "seed": plain(dropout.seed_generator.state.value),
    }


class Late(keras.Model):
    """Built by its first call; trains without Keras' symbolic build."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(1)
        self.optimizer_of_its_own = sgd()

    def call(self, x: Any) -> Any:
        return self.out(x)

    def train_step(self, data: Any) -> Any:
        x, y, *_ = data
        loss = keras.ops.mean(keras.ops.square(self(x) - y))
        self.zero_grad()
        loss.backward()
        weights = self.out.trainable_weights
        self.optimizer_of_its_own.apply([v.value.grad for v in weights], weights)
        return {"loss": loss}

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """As for a model that has no `call`."""


def unbuilt() -> dict[str, Any]:
    x, y = rows(8)
    model = made(Late, optimizer=None, loss=None)
    unisono.parallel(model)
    predicted = model.predict(x, batch_size=4, verbose=0)
    error = ""
    model = made(Late, optimizer=None, loss=None)
    unisono.parallel(model)
    try:
        model.train_on_batch(x, y)
    except unisono.errors.StrategyError as found:
        error = str(found)
    kernel = keras.ops.convert_to_numpy(model.out.kernel)
    return {"predicted": predicted, "error": error, "kernel": kernel}


def root_of_mean(y_true: Any, y_pred: Any) -> Any:
    """No mean over samples: it needs the outputs of all replicas."""
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_true - y_pred)) + 0.1)


class RootOfMean(keras.losses.Loss):
    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return root_of_mean(y_true, y_pred)


def small_batches(make_parallel: Any = unisono.parallel) -> list[Any]:
    """Batches of 4, 4 and 2 rows; the last has fewer rows than there are processes."""
    keras.utils.set_random_seed(3)
    model = mlp()
    model.compile(sgd(), RootOfMean(), metrics=["mae", keras.metrics.R2Score()])
    make_parallel(model)
    x, y = rows(10)
    history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    scores = model.evaluate(x, y, batch_size=4, verbose=0)
    predicted = model.predict(x, batch_size=4, verbose=0)
    return [*state(model), *map(np.asarray, history.values()), np.asarray(scores), predicted]


class Summed(keras.Model):
    """Minimizes a sum over rows, by an optimizer of torch's own."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.zero_grad()
        loss = keras.ops.sum(keras.ops.square(y - self(x, training=True)))
        loss.backward()
        self.native.step()
        return {"loss": loss}


def summed(make_parallel: Any = unisono.parallel) -> list[Any]:
    """Batches of 4, 4 and 2 rows; the last has fewer rows than there are processes."""
    keras.utils.set_random_seed(3)
    net = mlp()
    model = Summed(net.inputs, net.outputs)
    model.native = torch.optim.SGD(model.parameters(), 0.01)
    model.compile(loss="mse")
    make_parallel(model).fit(*rows(10), batch_size=4, shuffle=False, verbose=0)
    return [keras.ops.convert_to_numpy(v) for v in model.trainable_variables]


class Probe(keras.callbacks.Callback):
    """Trains a layer of its own on what a model predicts."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        layer = keras.layers.Dense(1, kernel_initializer="zeros")
        layer.build((None, 2))
        optimizer = torch.optim.SGD(layer.parameters(), 1.0)
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        self.weights = plain(layer.kernel.value)


def probed() -> Any:
    """A callback of the chief's alone steps an optimizer of torch's own."""
    probe = unisono.callbacks.chief_only(Probe())
    unisono.parallel(made()).fit(*rows(8), batch_size=4, verbose=0, callbacks=[probe])
    return getattr(probe, "weights", None)
