"""Layers that compute the same in a cheaper way on TensorFlow's CPU kernels.

Used only where `chosen_cpu_layers` allows it, and only for layers whose `call` is Keras' own:

- `conv_1x1`: a convolution of single pixels as a matrix product, whose gradients are cheaper.
- `conv_bias`: a bias that is added as a tensor gets its gradient from a plain sum. TensorFlow fuses
  the gradient of `bias_add` with that of the kernel, which takes up to twice as long.
- `batch_norm`: the fused kernels, where Keras' formula is an op for each pass over the rows. The
  kernels sum one by one, which costs digits over many rows. So pixels are presented to them as
  channels of their own, each with few rows, and the results are merged.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from unisono.backends.tensorflow.framework import TensorFlowFramework
from unisono.backends.tensorflow.internals import GraphOrParentsInXlaContext
from unisono.backends.tensorflow.replica import TensorFlowReplica
from unisono.devices import Placement
from unisono.devices.cpu_layers import chosen_cpu_layers
from unisono.hooks import bind, original, unbind
from unisono.keras_internals import layers_of

_MAX_PIXELS = 32
"""The most pixels of an image that one sum of a batch norm runs over."""

_Current = Callable[[], TensorFlowReplica | None]
_Formula = Callable[[Any, Any, Any], Any]


def cpu_layers_on(placement: Placement, *, is_alone: bool = False) -> "CpuLayers | None":
    """The layers that processes on this placement replace, if any."""
    names = chosen_cpu_layers(placement, TensorFlowFramework.cpu_layers)
    return CpuLayers(names, is_alone=is_alone) if names else None


class CpuLayers:
    """The replacements of some names; see replication.Kernels."""

    def __init__(self, names: frozenset[str], *, is_alone: bool) -> None:
        """`is_alone`: use them at any time, and not only while a replica's step runs."""
        self._names = names
        self._is_alone = is_alone

    def use_kernels(self, model: keras.Model, current: _Current, *, sync_batch_norm: bool) -> None:
        mapped = _mapped_layers(model)
        for layer in layers_of(model):
            if self._replaces_convolution(layer):
                bind(layer, "call", self._convolution(layer, current))
            elif self._replaces_batch_norm(layer) and id(layer) not in mapped:
                bind(layer, "call", self._batch_norm(layer, current, is_global=sync_batch_norm))

    def leave_kernels(self, model: keras.Model) -> None:
        for layer in layers_of(model):
            if self._replaces_convolution(layer) or self._replaces_batch_norm(layer):
                unbind(layer, "call")

    def _replaces_convolution(self, layer: Any) -> bool:
        if type(layer).call is not layers.Conv2D.call:  # Which other ranks share.
            return False
        is_plain = type(layer).convolution_op is layers.Conv2D.convolution_op and layer.rank == 2
        return is_plain and bool(self._names & {"conv_1x1", "conv_bias"})

    def _replaces_batch_norm(self, layer: Any) -> bool:
        plain = layers.BatchNormalization
        is_plain = type(layer).call is plain.call and type(layer)._moments is plain._moments
        return is_plain and "batch_norm" in self._names

    def _convolution(self, layer: Any, current: _Current) -> Callable[[Any], Any]:
        def call(inputs: Any) -> Any:
            is_used = (self._is_alone or current() is not None) and _are_images(layer, inputs)
            is_product = is_used and "conv_1x1" in self._names and _is_of_pixels(layer, inputs)
            is_split = is_used and "conv_bias" in self._names and layer.use_bias
            if not (is_product or is_split):
                return original(layer, "call")(inputs)
            kernel = ops.convert_to_tensor(layer.kernel)
            outputs = (_product if is_product else layer.convolution_op)(inputs, kernel)
            outputs = outputs + ops.convert_to_tensor(layer.bias) if layer.use_bias else outputs
            return outputs if layer.activation is None else layer.activation(outputs)

        return call

    def _batch_norm(self, layer: Any, current: _Current, *, is_global: bool) -> Callable[..., Any]:
        def call(inputs: Any, training: Any = None, mask: Any = None) -> Any:
            replica = current()
            is_used = training and layer.trainable and (self._is_alone or replica is not None)
            if not (is_used and _can_normalize(layer, inputs, mask, replica)):
                return original(layer, "call")(inputs, training=training, mask=mask)
            return _normalize(layer, inputs, replica if is_global else None, formula)

        def formula(x: Any, gamma: Any, beta: Any) -> Any:
            mean, variance = layer._moments(x, None)
            return tf.nn.batch_normalization(x, mean, variance, beta, gamma, layer.epsilon)

        return call


# -- convolutions ---------------------------------------------------------------------------------


def _are_images(layer: Any, inputs: Any) -> bool:
    is_exact = isinstance(inputs, tf.Tensor) and inputs.dtype in (tf.float32, tf.float64)
    return is_exact and inputs.shape.rank == 4 and layer.data_format == "channels_last"


def _is_of_pixels(layer: Any, inputs: Any) -> bool:
    kernel = ops.convert_to_tensor(layer.kernel)
    is_dense = tuple(kernel.shape[:3]) == (1, 1, inputs.shape[3])
    return is_dense and kernel.dtype == inputs.dtype and tuple(layer.strides) == (1, 1)


def _product(inputs: Any, kernel: Any) -> Any:
    pixels = tf.matmul(tf.reshape(inputs, [-1, inputs.shape[3]]), kernel[0, 0])
    shape = tf.concat([tf.shape(inputs)[:3], tf.shape(kernel)[3:]], 0)
    return tf.ensure_shape(tf.reshape(pixels, shape), [*inputs.shape[:3], kernel.shape[3]])


# -- batch norm -----------------------------------------------------------------------------------


def _mapped_layers(model: keras.Model) -> set[int]:
    """Layers that may run in a `tf.vectorized_map`, which drops custom gradients."""
    wrappers = [one for one in layers_of(model) if isinstance(one, layers.TimeDistributed)]
    return {id(layer) for wrapper in wrappers for layer in layers_of(wrapper)}


def _can_normalize(layer: Any, inputs: Any, mask: Any, replica: TensorFlowReplica | None) -> bool:
    """Whether the kernels compute what the layer needs."""
    if not (isinstance(inputs, tf.Tensor) and inputs.dtype == tf.float32):
        return False
    shape = inputs.shape
    if shape.rank != 4 or layer.axis not in (-1, 3) or not all(shape[1:]) or shape[0] == 0:
        return False
    may_be_empty = replica is not None and replica.may_be_empty
    # XLA's own batch norm takes the variance as a difference of squares.
    is_for_xla = bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))
    return not (mask is not None or layer.renorm or may_be_empty or is_for_xla)


def _normalize(layer: Any, x: Any, replica: TensorFlowReplica | None, formula: _Formula) -> Any:
    """A layer's outputs in training, by the statistics of all replicas, or of these rows alone.

    `formula(x, gamma, beta)` computes the same by ops that can be differentiated twice.
    """
    num_channels = x.shape[3]
    gamma = ops.cast(layer.gamma, x.dtype) if layer.scale else tf.ones([num_channels])
    beta = ops.cast(layer.beta, x.dtype) if layer.center else tf.zeros([num_channels])
    statistics = _statistics(tf.stop_gradient(x))
    if replica is not None:
        statistics = _merged(tf.stop_gradient(replica.stack(tf.stack(statistics))))
    _, mean, variance = statistics
    for moving, new in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        old = ops.cast(moving, x.dtype)
        moving.assign(old * layer.momentum + new * (1.0 - layer.momentum))
    outputs = _Normalization(layer.epsilon, replica, formula)(x, gamma, beta, *statistics)
    return ops.cast(outputs, layer.compute_dtype)


class _Normalization:
    """Outputs of given statistics, whose gradient includes that through the statistics."""

    def __init__(
        self, epsilon: float, replica: TensorFlowReplica | None, formula: _Formula
    ) -> None:
        self._epsilon = epsilon
        self._replica = replica
        self._formula = formula

    def __call__(self, *operands: Any) -> Any:
        # All that is differentiated must be an argument: TensorFlow searches for variables in all
        # that the outputs depend on, up to the arguments.
        @tf.custom_gradient
        def outputs(x: Any, gamma: Any, beta: Any, count: Any, mean: Any, variance: Any) -> Any:
            y = _transformed(x, mean, variance, gamma, beta, self._epsilon)

            def gradient(above: Any) -> Any:
                found = self._gradients(x, gamma, beta, count, mean, variance, above)
                return (*found, None, None, None)

            return y, gradient

        return outputs(*operands)

    def _gradients(self, *operands: Any) -> Any:
        @tf.custom_gradient
        def gradients(
            x: Any, gamma: Any, beta: Any, count: Any, mean: Any, variance: Any, above: Any
        ) -> Any:
            found = self._by_kernels(x, gamma, count, mean, variance, above)

            def gradient(*above_these: Any) -> Any:
                of_x, of_gamma, of_beta, of_above = self._second(x, gamma, beta, above, above_these)
                return of_x, of_gamma, of_beta, None, None, None, of_above

            return found, gradient

        return gradients(*operands)

    def _by_kernels(
        self, x: Any, gamma: Any, count: Any, mean: Any, variance: Any, above: Any
    ) -> tuple[Any, Any, Any]:
        num_pieces = _num_pieces(x)
        direct, of_gamma, of_beta, *_ = tf.raw_ops.FusedBatchNormGradV3(
            y_backprop=_in_pieces(above, num_pieces),
            x=_in_pieces(x, num_pieces),
            scale=tf.tile(gamma, [num_pieces]),
            reserve_space_1=tf.tile(mean, [num_pieces]),
            reserve_space_2=tf.tile(variance, [num_pieces]),
            reserve_space_3=tf.zeros([0]),
            epsilon=self._epsilon,
            is_training=False,
        )
        sums = tf.stack(
            [tf.reduce_sum(tf.reshape(s, [num_pieces, -1]), 0) for s in (of_gamma, of_beta)]
        )
        all_sums = sums if self._replica is None else self._replica.all_reduce_gradient(sums)
        scale = gamma * tf.math.rsqrt(variance + self._epsilon)
        by_x, by_one = tf.unstack(-scale * all_sums / count)
        through_statistics = _transformed(x, mean, variance, by_x, by_one, self._epsilon)
        return tf.reshape(direct, tf.shape(x)) + through_statistics, sums[0], sums[1]

    def _second(self, x: Any, gamma: Any, beta: Any, above: Any, above_these: Any) -> list[Any]:
        """Gradients of the gradients."""
        operands = [x, gamma, beta]
        with tf.GradientTape() as outer:
            outer.watch([*operands, above])
            with tf.GradientTape() as inner:
                inner.watch(operands)
                y = self._formula(*operands)
            found = inner.gradient(y, operands, above)
        zero = tf.UnconnectedGradients.ZERO
        result: list[Any] = outer.gradient(
            found, [*operands, above], list(above_these), unconnected_gradients=zero
        )
        return result


def _num_pieces(x: Any) -> int:
    """The fewest equal pieces of an image's pixels that have at most `_MAX_PIXELS` each."""
    num_pixels = x.shape[1] * x.shape[2]
    fewest = -(-num_pixels // _MAX_PIXELS)
    return next(n for n in range(fewest, num_pixels + 1) if num_pixels % n == 0)


def _in_pieces(x: Any, num_pieces: int) -> Any:
    return tf.reshape(x, [-1, 1, 1, num_pieces * x.shape[3]])


def _statistics(x: Any) -> tuple[Any, Any, Any]:
    """Count, mean and variance, each with one entry per channel."""
    num_pieces = _num_pieces(x)
    pieces = _in_pieces(x, num_pieces)
    ones = tf.ones([pieces.shape[3]])
    none = tf.zeros([0])
    _, means, variances, *_ = tf.raw_ops.FusedBatchNormV3(
        x=pieces, scale=ones, offset=ones, mean=none, variance=none, is_training=True
    )
    count = tf.cast(tf.shape(pieces)[0], x.dtype)
    variances *= tf.maximum(count - 1.0, 1.0) / count  # The kernel divides by one row less.
    parts = tf.reshape(tf.stack([count * ones, means, variances]), [3, num_pieces, -1])
    return _merged(tf.transpose(parts, [1, 0, 2]))


def _merged(parts: Any) -> tuple[Any, Any, Any]:
    """Count, mean and variance of all rows, from those of parts along the first axis."""
    counts, means, variances = parts[:, 0], parts[:, 1], parts[:, 2]
    total = tf.reduce_sum(counts, 0)
    mean = tf.reduce_sum(counts * means, 0) / total
    variance = tf.reduce_sum(counts * (variances + tf.square(means - mean)), 0) / total
    return total, mean, variance


def _transformed(x: Any, mean: Any, variance: Any, gamma: Any, beta: Any, epsilon: float) -> Any:
    """(x - mean) / sqrt(variance + epsilon) * gamma + beta."""
    return tf.raw_ops.FusedBatchNormV3(
        x=x,
        scale=gamma,
        offset=beta,
        mean=mean,
        variance=variance,
        epsilon=epsilon,
        is_training=False,
    )[0]
