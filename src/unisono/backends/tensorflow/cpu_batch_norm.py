"""Batch norm of images on TensorFlow's own CPU kernels, where Keras' formula is an op a pass.

Less than half of the time, and on nets of many batch norms a tenth of a step. The kernels add up
one by one, which over many rows would cost digits: they are shown neighbouring pixels as channels
of their own, so that each adds up few rows, and what they found is put together.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras import ops
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from unisono.backends.tensorflow.replica import TensorFlowReplica

_MOST_PIXELS = 32
"""Of an image, that one sum adds up."""

_Formula = Callable[[Any, Any, Any], Any]


def can_normalize(layer: Any, inputs: Any, mask: Any, replica: TensorFlowReplica | None) -> bool:
    """Whether the kernels do what the layer asks for."""
    if not (isinstance(inputs, tf.Tensor) and inputs.dtype == tf.float32):
        return False
    shape = inputs.shape
    if shape.rank != 4 or layer.axis not in (-1, 3) or not all(shape[1:]) or shape[0] == 0:
        return False
    may_be_empty = replica is not None and replica.may_be_empty
    return not (mask is not None or layer.renorm or may_be_empty or _is_for_xla())


def _is_for_xla() -> bool:
    """Whether this is traced for XLA, which takes such a variance as a difference of squares."""
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def normalize(layer: Any, x: Any, replica: TensorFlowReplica | None, formula: _Formula) -> Any:
    """A layer's outputs in training, by the statistics of all replicas, or of these rows alone.

    `formula(x, gamma, beta)` gives the same by operations that can be differentiated twice.
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
    """Outputs of given statistics, whose gradient knows that these are of the inputs."""

    def __init__(
        self, epsilon: float, replica: TensorFlowReplica | None, formula: _Formula
    ) -> None:
        self._epsilon = epsilon
        self._replica = replica
        self._formula = formula

    def __call__(self, *operands: Any) -> Any:
        # What a gradient is taken of must be an argument: TensorFlow searches for variables in
        # all that the outputs depend on, short of the arguments.
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
    """The fewest into which the pixels of an image can be told apart, none of too many."""
    num_pixels = x.shape[1] * x.shape[2]
    fewest = -(-num_pixels // _MOST_PIXELS)
    return next(n for n in range(fewest, num_pixels + 1) if num_pixels % n == 0)


def _in_pieces(x: Any, num_pieces: int) -> Any:
    return tf.reshape(x, [-1, 1, 1, num_pieces * x.shape[3]])


def _statistics(x: Any) -> tuple[Any, Any, Any]:
    """Count, mean and variance, each with one entry a channel."""
    num_pieces = _num_pieces(x)
    pieces = _in_pieces(x, num_pieces)
    ones = tf.ones([pieces.shape[3]])
    none = tf.zeros([0])
    _, means, variances, *_ = tf.raw_ops.FusedBatchNormV3(
        x=pieces, scale=ones, offset=ones, mean=none, variance=none, is_training=True
    )
    count = tf.cast(tf.shape(pieces)[0], x.dtype)
    variances *= tf.maximum(count - 1.0, 1.0) / count  # The kernel's are over one row less.
    parts = tf.reshape(tf.stack([count * ones, means, variances]), [3, num_pieces, -1])
    return _merged(tf.transpose(parts, [1, 0, 2]))


def _merged(parts: Any) -> tuple[Any, Any, Any]:
    """Count, mean and variance of everything, from those of parts along the first axis."""
    counts, means, variances = parts[:, 0], parts[:, 1], parts[:, 2]
    total = tf.reduce_sum(counts, 0)
    mean = tf.reduce_sum(counts * means, 0) / total
    variance = tf.reduce_sum(counts * (variances + tf.square(means - mean)), 0) / total
    return total, mean, variance


def _transformed(x: Any, mean: Any, variance: Any, gamma: Any, beta: Any, epsilon: float) -> Any:
    """x as units from its mean, times gamma, plus beta."""
    return tf.raw_ops.FusedBatchNormV3(
        x=x,
        scale=gamma,
        offset=beta,
        mean=mean,
        variance=variance,
        epsilon=epsilon,
        is_training=False,
    )[0]
