"""Which models, optimizers and metrics a user's own step uses: known once it has been traced."""

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs

from unisono.errors import StrategyError
from unisono.replication.custom_loop import living_keras_objects

_as_written = tf.autograph.experimental.do_not_convert


class KnownSteps:
    """The steps of a loop, each traced once on one device.

    `to_spec` says what one device would get in place of an argument; `take` is given the models,
    optimizers and metrics of a new step, and the Keras variables that belong to none of them.
    `is_shared`: whether replicas share a variable of TensorFlow's own, since one process has them.
    """

    def __init__(
        self,
        to_spec: Callable[[Any], Any],
        take: Callable[[list[Any], list[Any], list[Any], list[Any]], None],
        *,
        is_shared: bool = False,
    ) -> None:
        self._to_spec = to_spec
        self._take = take
        self._is_shared = is_shared
        self._steps: dict[Any, Any] = {}
        self.is_tracing = False

    @_as_written
    def learn(self, step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        key = _identity(step)
        if key in self._steps:
            return
        specs = keras.tree.map_structure(self._to_spec, (list(args), dict(kwargs)))
        # Not in the scope below, which would stop the gradient tapes of the step.
        self.is_tracing = True
        try:
            traced = tf.function(step).get_concrete_function(*specs[0], **specs[1])
        finally:
            self.is_tracing = False
        used = {id(variable) for variable in traced.graph.variables}
        with tf.init_scope():
            models, optimizers, metrics = (
                [o for o in objects if any(id(v._value) in used for v in o.variables)]
                for objects in living_keras_objects()
            )
            owned = {id(v) for v in variables_of([*models, *optimizers, *metrics])}
            every = [v for v in gc.get_objects() if issubclass(type(v), keras.Variable)]
            loose = [v for v in every if id(v._value) in used and id(v) not in owned]
            if self._is_shared:
                # With the copies, of those that have them.
                values = [(v._value, *getattr(v._value, "values", ())) for v in every]
                _check_unwritten(traced.graph, {id(value) for some in values for value in some})
            self._take(models, optimizers, metrics, loose)
        self._steps[key] = step  # Kept alive: a key may hold ids.


def variables_of(objects: Sequence[Any]) -> list[Any]:
    """The variables of several objects, each once."""
    return list({id(v): v for o in objects for v in o.variables}.values())


def _check_unwritten(graph: Any, known: set[int]) -> None:
    """StrategyError where a step writes to a variable of which replicas have no copies."""
    inside = {id(outer): inner for outer, inner in graph.captures}
    for variable in graph.variables:
        handle = inside.get(id(variable.handle))
        if id(variable) in known or handle is None:
            continue
        for op in handle.consumers():
            _, written = get_read_write_resource_inputs(op)
            is_generator = op.type.startswith("Rng")
            if not is_generator and any(handle is resource for resource in written):
                raise StrategyError(
                    f"A step writes to the tf.Variable {variable.name!r}, which the replicas of "
                    "this process share: each would change what another has written. Make it a "
                    "keras.Variable, of which every replica gets a copy, or run one process per "
                    "replica with `unisono run`."
                )


def first_rows(structure: Any) -> list[Any]:
    """The tensors of a step's arguments that have rows."""
    leaves = [leaf for leaf in keras.tree.flatten(structure) if tf.is_tensor(leaf)]
    return [leaf for leaf in leaves if leaf.shape.rank]


def _identity(step: Any) -> Any:
    """Equal for functions of one source and one closure: a lambda is a new object each time."""
    code = getattr(step, "__code__", None)
    if code is None:
        return step
    cells = getattr(step, "__closure__", None) or ()
    owner = getattr(step, "__self__", None)
    return (code, id(owner), *(id(cell.cell_contents) for cell in cells))
