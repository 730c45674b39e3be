"""A user's program: classes of its own at top level, and no `__main__` guard. Run by tests."""

import os

import keras
import numpy as np
from keras import ops

import unisono


class Scale(keras.layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")

    def call(self, x):
        return x * self.factor


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.scale = Scale()
        self.out = keras.layers.Dense(1)

    def call(self, x):
        return self.out(self.scale(x))


class Quartic(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.mean(ops.square(y_true - y_pred) ** 2, axis=-1)


class Largest(keras.metrics.Metric):
    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.error = self.add_weight(shape=(), initializer="zeros", name="error")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = ops.max(ops.abs(ops.cast(y_true, y_pred.dtype) - y_pred))
        self.error.assign(ops.maximum(self.error, error))

    def result(self):
        return self.error.value


class Rows(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = slice(8 * index, 8 * index + 8)
        return self.x[rows], self.y[rows]


def train(replicas):
    keras.utils.set_random_seed(1)
    model = unisono.parallel(Net(), replicas=replicas) if replicas else Net()
    model.compile("sgd", Quartic(), metrics=[Largest()])
    x = np.linspace(-1, 1, 80, dtype="float32").reshape(20, 4)
    history = model.fit(Rows(x, x[:, :1]), epochs=2, verbose=0, shuffle=False)
    return [
        *history.history["loss"],
        *history.history["largest"],
        *map(np.sum, model.get_weights()),
    ]


apart = np.max(np.abs(np.subtract(train(None), train(2))))
print("the script runs in", os.getpid(), flush=True)
print("close" if apart < 1e-5 else f"apart by {apart}", flush=True)
