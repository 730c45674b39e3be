"""Where a collective is called in a program: eagerly, in a graph of TensorFlow, under a tape.

Collectives themselves run eagerly, after a negotiation. A graph of TensorFlow calls them while it
runs, in the order of the program. JAX offers no such way back into Python that may itself use
JAX, so there they are eager only.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from unisono.errors import DisagreementError, StrategyError

Run = Callable[[list[Any]], list[Any]]
Shape = tuple[int | None, ...]


def run_here(
    what: str,
    tensors: Sequence[Any],
    forward: Run,
    backward: Run | None,
    shapes: Callable[[], list[tuple[str, Shape | None]]],
) -> list[Any]:
    """`forward(tensors)` wherever the caller is, with the gradients that `backward` gives.

    `shapes()` tells type and shape of the results, as far as they are known in a graph.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return _run_on_tensorflow(tensors, forward, backward, shapes)
    if backend == "torch":
        return _run_on_torch(tensors, forward, backward)
    check_not_traced(what, tensors)
    return forward(list(tensors))


def check_not_traced(what: str, tensors: Sequence[Any]) -> None:
    """Raise where JAX traces a function: a collective would run once, and not in each call."""
    import jax

    if any(isinstance(tensor, jax.core.Tracer) for tensor in tensors):
        raise StrategyError(
            f"{what} was called while JAX traces a function (jax.jit, jax.grad). On JAX the "
            "collectives are eager: call it outside, on the function's results. In fit, "
            "hvd.DistributedOptimizer reduces the gradients."
        )


def disagreement(message: str, *, is_bad_argument: bool) -> DisagreementError:
    """The error for requests that do not fit together, which is also what Horovod raises.

    On TensorFlow that is FailedPreconditionError, or InvalidArgumentError where one process' own
    arguments are wrong; elsewhere RuntimeError, which every DisagreementError is.
    """
    if keras.backend.backend() != "tensorflow":
        return DisagreementError(message)
    mismatch, bad_argument = _tensorflow_disagreements()
    return (bad_argument if is_bad_argument else mismatch)(message)


@functools.cache
def _tensorflow_disagreements() -> tuple[type[DisagreementError], type[DisagreementError]]:
    import tensorflow as tf

    def also(base: Any) -> type[DisagreementError]:
        def init(self: Any, message: str) -> None:
            base.__init__(self, None, None, message)

        return type("DisagreementError", (DisagreementError, base), {"__init__": init})

    return also(tf.errors.FailedPreconditionError), also(tf.errors.InvalidArgumentError)


def is_sparse(value: Any) -> bool:
    """Whether a gradient is given as some rows of a tensor (TensorFlow's IndexedSlices)."""
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return isinstance(value, tf.IndexedSlices)


def to_dense(value: Any) -> Any:
    """A tensor of what may be given as some of its rows."""
    if not is_sparse(value):
        return value
    import tensorflow as tf

    return tf.convert_to_tensor(value)


def with_rows(sparse: Any, values: Any, indices: Any) -> Any:
    """IndexedSlices of the same tensor with other rows."""
    import tensorflow as tf

    return tf.IndexedSlices(values, indices, dense_shape=sparse.dense_shape)


def _run_on_tensorflow(
    tensors: Sequence[Any],
    forward: Run,
    backward: Run | None,
    shapes: Callable[[], list[tuple[str, Shape | None]]],
) -> list[Any]:
    import tensorflow as tf

    def run(*given: Any) -> list[Any]:
        if tf.executing_eagerly():
            return forward(list(given))
        expected = shapes()
        results = tf.py_function(
            lambda *eager: forward(list(eager)), given, [dtype for dtype, _ in expected]
        )
        for result, (_, shape) in zip(results, expected, strict=True):
            result.set_shape(shape)
        return list(results)

    if backward is None:
        return run(*tensors)

    @tf.custom_gradient
    def run_recorded(*given: Any) -> Any:
        return run(*given), lambda *upstream: backward(list(upstream))

    results = run_recorded(*tensors)
    return list(results)


def _run_on_torch(tensors: Sequence[Any], forward: Run, backward: Run | None) -> list[Any]:
    import torch

    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if backward is None or not needs_gradient:
        with torch.no_grad():
            return forward(list(tensors))

    go, come_back = forward, backward

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            return tuple(go(list(given)))

        @staticmethod
        def backward(ctx: Any, *upstream: Any) -> Any:
            return tuple(come_back(list(upstream)))

    return list(Recorded.apply(*tensors))
