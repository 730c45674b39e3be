"""Batch norm over replicas: statistics of the global batch, or of each replica alone.

Where a replica sees only its rows (TensorFlow, torch) the statistics of the global batch are put
together from each replica's count, mean and squared distances, which loses no digits. Where the
program sees all rows (JAX), statistics per replica are those of groups of rows.
"""

from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops

from unisono.hooks import bind, original, unbind
from unisono.keras_internals import MOMENTS, layers_of, reduction_axes


def batch_norms(model: keras.Model) -> Iterator[Any]:
    """The batch norm layers of a model, nested ones included."""
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            yield layer


def synchronize_moments(layer: Any, current: Callable[[], Any]) -> None:
    """Take a layer's moments over all replicas.

    `current()` is the replica whose step is running (see step.Replica), or None outside a
    step, where the layer works as Keras wrote it.
    """

    def moments(inputs: Any, mask: Any) -> tuple[Any, Any]:
        replica = current()
        if replica is None:
            return local_moments(layer, inputs, mask)
        found: tuple[Any, Any] = replica.moments(inputs, mask, reduction_axes(layer))
        return found

    bind(layer, MOMENTS, moments)


def merged_moments(replica: Any, inputs: Any, mask: Any, axes: list[int]) -> tuple[Any, Any]:
    """Mean and variance over all replicas, from each one's count, mean and squared distances."""
    weights = _weights(inputs, mask, may_be_empty=replica.may_be_empty)
    own = ops.stack(_own_statistics(inputs, weights, axes))
    every = replica.stack(own)
    counts, means, distances = every[:, 0], every[:, 1], every[:, 2]
    total = ops.sum(counts, axis=0)
    # Keras adds epsilon to the count of a masked batch, which may be zero.
    total = total if mask is None else total + keras.backend.epsilon()
    mean = ops.sum(counts * means, axis=0) / total
    spread = ops.sum(distances + counts * ops.square(means - mean), axis=0)
    return mean, spread / total


def keep_moments_local(layer: Any) -> None:
    """Take a layer's moments over the replica's own rows only."""
    bind(layer, MOMENTS, lambda inputs, mask: local_moments(layer, inputs, mask))


def restore_moments(layer: Any) -> None:
    """Give a layer back to plain Keras."""
    unbind(layer, MOMENTS)


def local_moments(layer: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
    if mask is not None:
        result: tuple[Any, Any] = original(layer, MOMENTS)(inputs, mask)
        return result
    # Not the layer's own: `synchronized=True` raises off TensorFlow.
    mean, variance = ops.moments(inputs, axes=reduction_axes(layer))
    return mean, variance


def _weights(inputs: Any, mask: Any, *, may_be_empty: bool) -> Any:
    """How much each entry of the inputs counts, or None where each counts as one."""
    if mask is not None:
        weights = ops.broadcast_to(ops.expand_dims(mask, axis=-1), ops.shape(inputs))
        return ops.cast(weights, inputs.dtype)
    return ops.ones_like(inputs) if may_be_empty else None


def _own_statistics(inputs: Any, weights: Any, axes: list[int]) -> tuple[Any, Any, Any]:
    """Count, mean and summed squared distances from the mean, each with one entry a channel."""
    if weights is None:
        mean, variance = ops.moments(inputs, axes=axes)
        sizes = [ops.shape(inputs)[axis] for axis in axes]
        count = ops.cast(ops.prod(ops.convert_to_tensor(sizes, dtype="int32")), inputs.dtype)
        return count * ops.ones_like(mean), mean, count * variance
    count = ops.sum(weights, axis=axes, keepdims=True)
    mean = ops.sum(inputs * weights, axis=axes, keepdims=True) / ops.maximum(count, 1.0)
    distances = ops.sum(weights * ops.square(inputs - mean), axis=axes)
    return ops.squeeze(count, axis=axes), ops.squeeze(mean, axis=axes), distances


def group_statistics(layer: Any, num_groups: int) -> None:
    """Normalize each of `num_groups` equal groups of rows by its own statistics.

    One group is plain batch norm. The moving statistics take the mean over the groups.
    """
    bind(layer, MOMENTS, lambda inputs, mask: local_moments(layer, inputs, mask))
    if num_groups == 1:
        unbind(layer, "call")
        return

    def call(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        plain = original(layer, "call")
        if not (training and layer.trainable) or inputs.shape[0] % num_groups:
            return plain(inputs, training=training, mask=mask)
        if layer.renorm:
            return plain(inputs, training=training, mask=mask)
        x = ops.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        grouped = _by_group(x, num_groups)
        axes = [1, *(axis + 1 for axis in reduction_axes(layer) if axis)]
        weights = ops.ones_like(grouped)
        if mask is not None:
            weights = ops.broadcast_to(
                ops.expand_dims(_by_group(mask, num_groups), axis=-1), grouped.shape
            )
            weights = ops.cast(weights, x.dtype)
        total = ops.sum(weights, axis=axes, keepdims=True)
        total = total if mask is None else total + keras.backend.epsilon()
        mean = ops.sum(grouped * weights, axis=axes, keepdims=True) / total
        variance = ops.sum(weights * ops.square(grouped - mean), axis=axes, keepdims=True) / total
        _update_moving(layer, ops.mean(mean, axis=0), ops.mean(variance, axis=0))
        normal = (grouped - mean) * ops.rsqrt(variance + layer.epsilon)
        normal = ops.reshape(normal, x.shape)
        shape = [x.shape[i] if i not in reduction_axes(layer) else 1 for i in range(x.ndim)]
        if layer.scale:
            normal = normal * ops.reshape(ops.cast(layer.gamma, x.dtype), shape)
        if layer.center:
            normal = normal + ops.reshape(ops.cast(layer.beta, x.dtype), shape)
        return ops.cast(normal, layer.compute_dtype)

    bind(layer, "call", call)


def ungroup_statistics(layer: Any) -> None:
    """Give a layer back to plain Keras."""
    unbind(layer, MOMENTS, "call")


def _by_group(x: Any, num_groups: int) -> Any:
    return ops.reshape(x, (num_groups, x.shape[0] // num_groups, *x.shape[1:]))


def _update_moving(layer: Any, mean: Any, variance: Any) -> None:
    for variable, value in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        value = ops.reshape(value, variable.shape)
        old = ops.cast(variable, value.dtype)
        variable.assign(old * layer.momentum + value * (1.0 - layer.momentum))
