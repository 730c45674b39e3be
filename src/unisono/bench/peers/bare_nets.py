"""The measured nets without Keras, for the hand-written loops of JAX and TensorFlow.

The nets are written once, over a few layers that each framework implements. A set of `Layers` takes
its parameters in the order of the calls, or creates them in the first call. Batch norm uses the
statistics of the local batch, as an expert's loop does.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

MOMENTUM, LEARNING_RATE = 0.9, 5e-3
NORM_MOMENTUM, NORM_EPSILON = 0.99, 1e-3


class Layers(ABC):
    """One pass through a net in training."""

    def __init__(self, params: Sequence[Any] | None = None, dropout_key: Any = None) -> None:
        """Without `params`, they are created; without `dropout_key`, nothing is dropped."""
        self.params: list[Any] = list(params or ())
        self.statistics: list[Any] = []
        """Mean and variance of each batch norm, for its moving averages."""
        self.dropout_key = dropout_key
        self._is_new = params is None
        self._taken = 0
        import numpy  # The command line lists these loops without it.

        self._np = numpy
        self._rng = numpy.random.default_rng(0)

    def conv(
        self, x: Any, filters: int, size: int, *, strides: int = 1, padding: str = "SAME"
    ) -> Any:
        kernel, bias = self._weights((size, size, int(x.shape[-1]), filters))
        return self.convolve(x, kernel, strides, padding) + bias

    def dense(self, x: Any, units: int) -> Any:
        kernel, bias = self._weights((int(x.shape[-1]), units))
        return x @ kernel + bias

    def conv_norm(self, x: Any, filters: int, size: int, **options: Any) -> Any:
        """Convolution, batch norm and ReLU."""
        x = self.conv(x, filters, size, **options)
        gamma, beta = (self._take(fill, (filters,)) for fill in (self._np.ones, self._np.zeros))
        mean, variance = self.moments(x)
        self.statistics += [mean, variance]
        scale = gamma * (variance + NORM_EPSILON) ** -0.5
        return self.relu(x * scale + (beta - mean * scale))

    def _weights(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        limit = self._np.sqrt(6 / (self._np.prod(shape[:-2]) * (shape[-2] + shape[-1])))
        kernel = self._take(lambda shape: self._rng.uniform(-limit, limit, shape), shape)
        return kernel, self._take(self._np.zeros, shape[-1:])

    def _take(self, fill: Any, shape: tuple[int, ...]) -> Any:
        if self._is_new:
            self.params.append(self.variable(fill(shape).astype("float32")))
        self._taken += 1
        return self.params[self._taken - 1]

    @abstractmethod
    def variable(self, value: Any) -> Any: ...

    @abstractmethod
    def convolve(self, x: Any, kernel: Any, strides: int, padding: str) -> Any: ...

    @abstractmethod
    def moments(self, x: Any) -> tuple[Any, Any]: ...

    @abstractmethod
    def relu(self, x: Any) -> Any: ...

    @abstractmethod
    def max_pool(self, x: Any, size: int, strides: int) -> Any: ...

    @abstractmethod
    def mean_of_pixels(self, x: Any) -> Any: ...

    @abstractmethod
    def concatenate(self, parts: list[Any]) -> Any: ...

    @abstractmethod
    def flatten(self, x: Any) -> Any: ...

    @abstractmethod
    def dropout(self, x: Any) -> Any:
        """With a rate of 0.5."""


def logits(net: str, layers: Layers, x: Any) -> Any:
    """The outputs of a net, before softmax."""
    if net == "digits":
        x = layers.relu(layers.conv(x, 8, 3, padding="VALID"))
        return layers.dense(layers.flatten(x), 10)
    if net == "mnist":
        for filters in (16, 32):
            x = layers.relu(layers.conv(x, filters, 3, padding="VALID"))
            x = layers.max_pool(x, 2, 2)
        return layers.dense(layers.flatten(x), 10)
    x = layers.conv_norm(x, 96, 3)
    for block in ((32, 32), (32, 48), 80, (112, 48), (96, 64), (80, 80), (48, 96), 96):
        x = _block(layers, x, block)
    for _ in range(2):
        x = _block(layers, x, (176, 160))
    return layers.dense(layers.dropout(layers.mean_of_pixels(x)), 10)


def _block(layers: Layers, x: Any, filters: tuple[int, int] | int) -> Any:
    if isinstance(filters, int):
        pooled = layers.max_pool(x, 3, 2)
        return layers.concatenate(
            [layers.conv_norm(x, filters, 3, strides=2, padding="VALID"), pooled]
        )
    narrow, wide = filters
    return layers.concatenate([layers.conv_norm(x, narrow, 1), layers.conv_norm(x, wide, 3)])
