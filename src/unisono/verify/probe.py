"""Which layer of a model, or whether its loss, computes with other rows than its own.

The model is called on a batch and on its halves. A layer whose inputs agree row by row and whose
outputs do not mixes rows: on TensorFlow and torch it sees one replica's rows only. Batch norm is
called as in inference here: unisono synchronizes it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from unisono.hooks import bind, original, unbind
from unisono.keras_internals import layers_of
from unisono.replication.loss_trials import restored
from unisono.verify.facts import describe_layer
from unisono.verify.records import Mixing

_TOLERANCE = 1e-3
_MOST_ROWS = 32


def find_mixing(model: Any, x: Any, y: Any) -> Mixing:
    """Call a model on some rows; leaves no trace in it."""
    leaves = [leaf for leaf in keras.tree.flatten(x) if leaf is not None]
    count = min(_MOST_ROWS, int(leaves[0].shape[0])) // 2 * 2
    if count < 2:
        return Mixing()
    with restored(model):
        whole, predicted = _outputs(model, _rows(x, 0, count))
        halves = [
            _outputs(model, _rows(x, start, start + count // 2))[0] for start in (0, count // 2)
        ]
        layer = _first_other(model, whole, halves, count)
        found = Mixing(layer="" if layer is None else layer.name)
        if layer is None and y is not None and model.compiled:
            found = Mixing(is_loss=_loss_mixes(model, x, y, predicted, count))
    return found


def _outputs(model: Any, x: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """What each layer returned, in the order of calls, and the model's output."""
    noted: list[tuple[Any, Any]] = []
    with contextlib.ExitStack() as stack:
        for layer in layers_of(model, include_self=False):
            stack.enter_context(_noting(layer, noted))
        x = keras.tree.map_structure(
            lambda leaf: None if leaf is None else keras.ops.convert_to_tensor(leaf), x
        )
        predicted = model(x, training=True)
    return noted, predicted


@contextlib.contextmanager
def _noting(layer: Any, noted: list[tuple[Any, Any]]) -> Iterator[None]:
    if "call" in vars(layer):
        yield
        return
    is_batch_norm = isinstance(layer, keras.layers.BatchNormalization)

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_batch_norm:
            kwargs["training"] = False
        result = original(layer, "call")(*args, **kwargs)
        leaves = [leaf for leaf in keras.tree.flatten(result) if hasattr(leaf, "shape")]
        if leaves:
            noted.append((layer, keras.ops.stop_gradient(leaves[0])))
        return result

    bind(layer, "call", call)
    try:
        yield
    finally:
        unbind(layer, "call")


def _first_other(
    model: Any, whole: list[tuple[Any, Any]], halves: list[list[tuple[Any, Any]]], count: int
) -> Any:
    """The first layer whose outputs differ; None where it draws random numbers."""
    for (layer, every), *parts in zip(whole, *halves, strict=False):
        values = [np.asarray(keras.ops.convert_to_numpy(value)) for _, value in parts]
        every = np.asarray(keras.ops.convert_to_numpy(every))
        if any(part is not layer for part, _ in parts):
            return None
        if every.ndim == 0 or any(part.ndim != every.ndim for part in values):
            continue
        joined = np.concatenate(values)
        if joined.shape != every.shape or every.dtype.kind != "f":
            continue
        scale = max(1e-6, float(np.abs(every).max(initial=0.0)))
        if float(np.abs(joined - every).max(initial=0.0)) > _TOLERANCE * scale:
            return None if describe_layer(layer, {}).is_random else layer
    return None


def _loss_mixes(model: Any, x: Any, y: Any, predicted: Any, count: int) -> bool:
    """Whether the loss of a batch is neither the mean nor the sum of those of its halves."""
    half = count // 2

    def loss(start: int, stop: int) -> float:
        def tensors(structure: Any) -> Any:
            return keras.tree.map_structure(
                lambda leaf: None if leaf is None else keras.ops.convert_to_tensor(leaf),
                _rows(structure, start, stop),
            )

        value = model.compute_loss(
            x=tensors(x), y=tensors(y), y_pred=_rows(predicted, start, stop), training=True
        )
        return float(keras.ops.convert_to_numpy(keras.ops.stop_gradient(value)))

    every, parts = loss(0, count), [loss(0, half), loss(half, count)]
    scale = _TOLERANCE * max(1e-3, abs(every))
    return abs(every - sum(parts) / 2) > scale and abs(every - sum(parts)) > scale


def _rows(structure: Any, start: int, stop: int) -> Any:
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else leaf[start:stop], structure
    )
