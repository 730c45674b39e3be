"""Which models, optimizers and metrics a user's own step uses: known once it has been traced."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from unisono.engines.own_loop import living_keras_objects

_as_written = tf.autograph.experimental.do_not_convert


class KnownSteps:
    """The steps of a loop, each traced once on one device.

    `to_spec` says what one device would get in place of an argument; `take` is given the models,
    optimizers and metrics of a new step.
    """

    def __init__(
        self,
        to_spec: Callable[[Any], Any],
        take: Callable[[list[Any], list[Any], list[Any]], None],
    ) -> None:
        self._to_spec = to_spec
        self._take = take
        self._steps: dict[Any, Any] = {}

    @_as_written
    def learn(self, step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        key = _identity(step)
        if key in self._steps:
            return
        specs = keras.tree.map_structure(self._to_spec, (list(args), dict(kwargs)))
        # Not in the scope below, which would stop the gradient tapes of the step.
        traced = tf.function(step).get_concrete_function(*specs[0], **specs[1])
        used = {id(variable) for variable in traced.graph.variables}
        with tf.init_scope():
            models, optimizers, metrics = (
                [o for o in objects if any(id(v._value) in used for v in o.variables)]
                for objects in living_keras_objects()
            )
            self._take(models, optimizers, metrics)
        self._steps[key] = step  # Kept alive: a key may hold ids.


def variables_of(objects: Sequence[Any]) -> list[Any]:
    """The variables of several objects, each once."""
    return list({id(v): v for o in objects for v in o.variables}.values())


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
