"""The instance keys of TensorFlow's collective ops: which of the processes' ops belong together.

TensorFlow keeps a record of every key that it has seen, and takes one length and type for each. So
keys are used again, call after call, and a key is made of what the op is: its place among the
collectives of a call, its kind and type, and its length, which is rounded up to one of few. None
of this depends on how often a process has traced a function, which may differ between them.
"""

import weakref
from typing import Any

import tensorflow as tf

from unisono.errors import StrategyError

KINDS = ("Add", "Min", "Max", "Mul", "gather", "broadcast", "exchange")
DTYPES = (tf.float32, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float64)

# Lengths have six bits, after the first of them that is set: at most 1/64 is added to one.
_FINE = 64
_LENGTHS = 32 * _FINE
_SLOTS = len(KINDS) * len(DTYPES) * _LENGTHS
_PLACES = (2**31 - 1) // _SLOTS
_POWERS = [_FINE * 2**i for i in range(1, 25)]

_num_places: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_CAPTURE = "unisono_first_place"


def instance_key(kind: str, dtype: Any, length: Any) -> Any:
    """The key of the next collective of this call, whose `length` is one of `padded_length`."""
    steps = _steps(length)
    bucket = steps * _FINE + length // 2**steps
    slot = KINDS.index(kind) * len(DTYPES) + DTYPES.index(dtype)
    return _take_places(1) * _SLOTS + slot * _LENGTHS + bucket


def padded_length(length: Any) -> Any:
    """The length that is sent for a vector of this one: an integer, or a scalar of a graph."""
    step = 2 ** _steps(length)
    padded = -(-length // step) * step
    # At least one: TensorFlow crashes where nobody sends anything.
    return max(padded, 1) if isinstance(padded, int) else tf.maximum(padded, 1)


def static_length(vector: Any) -> Any:
    """The length of a vector, as an integer where it is known."""
    known = vector.shape[0]
    return tf.shape(vector)[0] if known is None else known


def _steps(length: Any) -> Any:
    """How often a length is halved to have no more bits than are told apart."""
    if isinstance(length, int):
        return sum(length > power for power in _POWERS)
    return tf.reduce_sum(tf.cast(length > tf.constant(_POWERS), tf.int32))


def _take_places(count: int) -> Any:
    """The first of so many places among the collectives of the call that is made or traced."""
    if tf.executing_eagerly():
        return 0
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    first = _num_places.get(graph, 0)
    _num_places[graph] = first + count
    if first + count > _PLACES:
        raise StrategyError(
            f"Asked for more than {_PLACES} collectives in one tf.function. Call it more often, "
            "for fewer steps each."
        )
    # A function may be called by others, each of which has collectives of its own before it.
    own = weakref.ref(graph)
    with graph.as_default():
        before = graph.capture_call_time_value(
            lambda: tf.convert_to_tensor(_take_places(_num_places[own()])),
            tf.TensorSpec([], tf.int32),
            key=_CAPTURE,
        )
        return before + first
