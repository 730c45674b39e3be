"""The arguments and results of calls on a model, as plain data that two runs can be compared by."""

from typing import Any

import keras
import numpy as np

from unisono.data.feed import Shard, checksum_of
from unisono.verify.records import sample

_MOST_ROWS = 64
_NAMES = ("callbacks", "self", "verbose")


def described(arguments: dict[str, Any]) -> dict[str, Any]:
    """Numbers and words as they are, arrays by shape and checksum, the rest by its class."""
    return {name: _described(value) for name, value in arguments.items() if name not in _NAMES}


def _described(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    leaves = keras.tree.flatten(value) if isinstance(value, (list, tuple, dict)) else [value]
    if all(_is_array(leaf) for leaf in leaves if leaf is not None):
        arrays = [leaf for leaf in leaves if leaf is not None]
        return ["array", [list(a.shape) for a in arrays], checksum_of(arrays)]
    return ["object", type(value).__name__]


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__getitem__")


def callbacks_of(arguments: dict[str, Any]) -> list[Any]:
    """The callbacks that the program has given to `fit`."""
    given = arguments.get("callbacks")
    given = getattr(given, "callbacks", given)
    return keras.tree.flatten(given) if given else []


def checksum_and_rows(batch: Any) -> tuple[int | None, int]:
    """A checksum and the rows of a global batch; no checksum of a process' shard of it."""
    if isinstance(batch, Shard):
        return None, int(batch.num_rows)
    leaves = [leaf for leaf in keras.tree.flatten(batch) if len(getattr(leaf, "shape", ()))]
    rows = int(leaves[0].shape[0]) if leaves and leaves[0].shape[0] is not None else 0
    return checksum_of(batch), rows


def watched(arguments: dict[str, Any], batches: list[tuple[int | None, int]]) -> None:
    """Have the batches of a tf.data.Dataset noted as TensorFlow's trainer takes them.

    Its iterators are read inside of compiled functions, where no observer sees a batch.
    """
    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    x = arguments.get("x")
    if not isinstance(x, tf.data.Dataset):
        return
    specs = tf.nest.flatten(x.element_spec)
    if not all(isinstance(spec, tf.TensorSpec) for spec in specs):
        return  # Ragged or sparse.

    def note(*leaves: Any) -> Any:
        batches.append(checksum_and_rows(list(leaves)))
        return np.int32(0)

    def watch(*elements: Any) -> Any:
        element = elements if isinstance(x.element_spec, tuple) else elements[0]
        leaves = tf.nest.flatten(element)
        with tf.control_dependencies([tf.numpy_function(note, leaves, tf.int32)]):
            return tf.nest.map_structure(tf.identity, element)

    arguments["x"] = x.map(watch)


def remembered(arguments: dict[str, Any]) -> tuple[Any, Any]:
    """Some of the data of a training, to evaluate and predict on; None for what has an end."""
    x, y = arguments.get("x"), arguments.get("y")
    if x is None:
        return None, None
    if hasattr(x, "element_spec") and hasattr(x, "take"):
        return x.take(1), None
    leaves = [leaf for leaf in keras.tree.flatten((x, y)) if leaf is not None]
    if not leaves or not all(_is_array(leaf) and len(leaf.shape) for leaf in leaves):
        return None, None
    count = min(_MOST_ROWS, int(arguments.get("batch_size") or 32), int(leaves[0].shape[0]))

    def first(leaf: Any) -> Any:
        return None if leaf is None else leaf[:count]

    try:
        return keras.tree.map_structure(first, x), keras.tree.map_structure(first, y)
    except Exception:  # Sparse, or of a library that slices in another way.
        return None, None


def results_of(name: str, model: Any, result: Any, most: int) -> dict[str, Any]:
    """What a call returned, as arrays by name."""
    if name == "fit":
        history = getattr(result, "history", None) or {}
        return {
            str(key): np.asarray(values, "float64")
            for key, values in history.items()
            if all(isinstance(v, (int, float, np.number)) for v in values)
        }
    if name.startswith("predict"):
        leaves = keras.tree.flatten(result)
        return {
            f"output {place}" if len(leaves) > 1 else "output": sample(leaf, most)
            for place, leaf in enumerate(leaves)
            if hasattr(leaf, "shape")
        }
    if isinstance(result, dict):
        return {str(key): np.asarray(value, "float64") for key, value in result.items()}
    values = np.asarray(result, "float64").reshape(-1)
    names = list(getattr(model, "metrics_names", []))
    if len(names) != len(values):
        names = [str(place) for place in range(len(values))]
    return {names[place]: values[place : place + 1] for place in range(len(values))}
