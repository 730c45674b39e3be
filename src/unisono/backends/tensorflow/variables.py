"""Variables, seeds and optimizers of Keras for replicas that tf.distribute runs in one process.

A Keras variable's plain tf.Variable is replaced by one with a copy on each replica, which that
replica alone writes. Keras' TensorFlow optimizer would reduce gradients and leave the replica's
context to update variables; here gradients are reduced before it begins.
"""

import contextlib
import gc
import types
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.global_state import get_global_attribute, set_global_attribute
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, SeedGenerator

from unisono.backends.tensorflow.internals import (
    MirroredVariable,
    ResourceVariable,
    get_read_write_resource_inputs,
    get_update_replica_id,
)
from unisono.hooks import bind, unbind
from unisono.replication.interrupts import interrupts_held_back
from unisono.replication.introspection import optimizers_of, rename_variables, with_inner
from unisono.replication.step import seed_stride

_COPIES = "unisono_copies"
_OPTIMIZER_METHODS = (
    "add_variable_from_reference",
    "_backend_update_step",
    "_apply_weight_decay",
    "_overwrite_model_variables_with_average_value",
    "_backend_increment_gradient_accumulators",
)


# -- variables ------------------------------------------------------------------------------------


class PlainLookingVariable(MirroredVariable):
    """A mirrored variable that can be used where a plain tf.Variable can.

    Callbacks call `float(model.optimizer.learning_rate)`, and a plain model may share layers.
    """

    def __int__(self) -> int:
        return int(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def __complex__(self) -> complex:
        return complex(self.numpy())

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def _update(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        # An interrupt inside TensorFlow's scopes would leave them entered.
        with interrupts_held_back() if tf.executing_eagerly() else contextlib.nullcontext():
            if get_update_replica_id() is None or isinstance(get_update_replica_id(), int):
                return super()._update(update_fn, value, **kwargs)
            # By the optimizer of a plain model that trains this variable too: write all copies.
            with self.distribute_strategy.scope():
                return self._update_cross_replica(update_fn, value, **kwargs)


def mirrored(variable: Any, strategy: tf.distribute.Strategy) -> Any:
    """The value of a Keras variable under a strategy; each replica writes its own copy."""
    value = variable._value
    if isinstance(value, MirroredVariable) and value.distribute_strategy is strategy:
        return value
    initial = value.numpy()  # Read here: it may belong to the scope of another strategy.
    with strategy.scope():
        copies = tf.Variable(
            initial,
            dtype=value.dtype,
            # Not the Keras variable's flag: a layer that is frozen now may be unfrozen later, and
            # TensorFlow's own flag is fixed.
            trainable=value.trainable,
            name=variable.name,
            aggregation=tf.VariableAggregation.NONE,
            synchronization=tf.VariableSynchronization.ON_WRITE,
        )
    copies.__class__ = PlainLookingVariable
    return copies


def plain(variable: Any) -> Any:
    """The value of a Keras variable without a strategy."""
    value = variable._value
    return tf.Variable(
        value.numpy(), dtype=value.dtype, trainable=value.trainable, name=variable.name
    )


def replace_values(
    variables: Iterable[Any],
    copy: Callable[[Any], Any],
    *,
    owner: keras.Model | None = None,
    more_optimizers: Iterable[Any] = (),
) -> None:
    """Give Keras variables new tf.Variables, and optimizers the keys that go with them.

    Models other than the `owner` that share one of them trace their steps again.
    """
    variables = [v for v in variables if v._value is not None]
    copies = [copy(variable) for variable in variables]
    pairs = zip(variables, copies, strict=True)
    changed = {id(v): (v, new) for v, new in pairs if v._value is not new}
    if not changed:
        return
    has_moved = any(isinstance(v._value, MirroredVariable) for v, _ in changed.values())
    # Only layers are shared between models, not their metrics and optimizers.
    own = {id(v) for v in owner.variables} if owner is not None else changed.keys()
    others, built = _users_of(own & changed.keys(), owner)
    models = others if owner is None else [owner, *others]
    optimizers = {id(o): o for one in models for o in with_inner(optimizers_of(one))}
    optimizers |= {id(o): o for o in with_inner([*more_optimizers, *built])}
    keys = {i: {id(v): o._var_key(v) for v, _ in changed.values()} for i, o in optimizers.items()}
    for variable, new in changed.values():
        variable._value = new
    for i, optimizer in optimizers.items():
        renamed = {keys[i][id(v)]: optimizer._var_key(v) for v, _ in changed.values()}
        rename_variables(optimizer, renamed)
    for one in models if has_moved else others:
        forget_functions(one)


def forget_functions(model: keras.Model) -> None:
    """Have a model trace its steps again: earlier traces refer to other variables."""
    model.train_function = None
    model.test_function = None
    model.predict_function = None


def _users_of(
    variables: Set[int], owner: keras.Model | None
) -> tuple[list[keras.Model], list[Any]]:
    """Other models that share one of these variables, and optimizers that were built for one.

    There is no register of them, and an optimizer of a custom training loop belongs to no model.
    """
    models: list[keras.Model] = []
    optimizers: list[Any] = []
    for found in gc.get_objects() if variables else ():
        if issubclass(type(found), keras.Model):
            if found is not owner and any(id(v) in variables for v in found.variables):
                models.append(found)
        elif issubclass(type(found), keras.optimizers.Optimizer):
            known = getattr(found, "_trainable_variables", ())
            if any(id(variable) in variables for variable in known):
                optimizers.append(found)
    return models, optimizers


COPIES = "_unisono_copies"
"""The attribute of a tf.Variable that holds the copies of other replicas."""


def shared_write(graph: Any, of_replicas: Iterable[Any] = ()) -> str | None:
    """Why replicas of this process cannot run a traced step: it writes to what they share.

    Returns None where it writes to Keras variables only, of which every replica has a copy;
    `of_replicas` are some that are known to have one.
    """
    known = _ids_of_handles(of_replicas)
    # Not by `graph.variables`, which is empty as long as the graph is traced.
    written = [outer for outer, inner in graph.captures if _is_written(inner)]
    written = [handle for handle in written if id(handle) not in known]
    if not written:
        return None
    # Searched for only now: a process has many objects.
    found = gc.get_objects()
    known = _ids_of_handles(o for o in found if issubclass(type(o), keras.Variable))
    variables = {id(o.handle): o for o in found if issubclass(type(o), ResourceVariable)}
    for variable in variables.values():
        # In an attribute of a model: every replica has a copy, see replica_threads.
        if copies := vars(variable).get(COPIES):
            known |= {id(one.handle) for one in (variable, *copies)}
    shared = [variables.get(id(handle)) for handle in written if id(handle) not in known]
    name = next((variable.name for variable in shared if variable is not None), None)
    if name is None:  # Tables, iterators and the like.
        return None
    return (
        f"A step writes to the tf.Variable {name!r}, which the replicas of this process share: "
        "each would change what another has written. Make it a keras.Variable, of which every "
        "replica gets a copy, or run one process per replica with `unisono run`."
    )


def _ids_of_handles(variables: Iterable[Any]) -> set[int]:
    """Ids of the resources of Keras variables: one, or one for each replica."""
    values = [v._value for v in variables if v._value is not None]
    parts = [part for value in values for part in getattr(value, "values", (value,))]
    return {id(part.handle) for part in parts if isinstance(part, ResourceVariable)}


def _is_written(handle: Any) -> bool:
    """Whether ops of a graph write to a variable, other than to draw random numbers."""
    if handle.dtype != tf.resource:
        return False
    ops = [op for op in handle.consumers() if not op.type.startswith("Rng")]
    written = [resource for op in ops for resource in get_read_write_resource_inputs(op)[1]]
    return any(handle is resource for resource in written)


# -- seeds ----------------------------------------------------------------------------------------


def spread_seed(state: Any) -> None:
    """Give each replica but the first a random stream of its own."""
    values = state._value.values
    first = values[0].numpy()
    for replica, value in enumerate(values[1:], start=1):
        value.assign([first[0] + replica * seed_stride(), first[1]])


class StepSeeds:
    """Replaces Keras' global seed generator in a step: each replica draws from its own stream.

    `keras.random` functions without a seed draw from it. The global generator itself is not
    replicated, since plain models, models on other devices and the program use it too; steps draw
    from a copy, whose state has a value for each replica. Made in the thread that runs the step.
    `strategy` has the replicas of this process; without one, this is the replica `rank` of a run.
    """

    def __init__(self, strategy: tf.distribute.Strategy | None = None, rank: int = 0) -> None:
        self._strategy = strategy
        self._rank = rank
        self._generator = get_global_attribute(GLOBAL_SEED_GENERATOR)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Have functions without a seed draw from here, in this thread."""
        set_global_attribute(GLOBAL_SEED_GENERATOR, self)
        try:
            yield
        finally:
            self.finish()

    def finish(self) -> None:
        """Restore this thread's global generator, or set the one that the step has made."""
        set_global_attribute(GLOBAL_SEED_GENERATOR, self._generator)

    def next(self, ordered: bool = True) -> Any:
        """See SeedGenerator."""
        copies = {} if self._generator is None else vars(self._generator).get(_COPIES, {})
        if self._strategy not in copies:
            # In a thread that is neither tracing a graph nor one of the replicas'.
            with ThreadPoolExecutor(1) as outside:
                copies = outside.submit(self._copies).result()
        return copies[self._strategy].next(ordered)

    def _copies(self) -> dict[Any, Any]:
        """The copies of the global seed generator by strategy, including this one's."""
        if self._generator is None:
            self._generator = SeedGenerator()  # As Keras does, when one is first needed.
        copies: dict[Any, Any] = vars(self._generator).setdefault(_COPIES, {})
        first, second = (int(word) for word in self._generator.state.numpy())
        copy = SeedGenerator(0)
        # One stride more for all, so that no replica draws what the program draws.
        copy.state.assign([(first + (self._rank + 1) * seed_stride()) % 2**31, second])
        if self._strategy is not None:
            copy.state._value = mirrored(copy.state, self._strategy)
            spread_seed(copy.state)
        copies[self._strategy] = copy
        return copies


# -- optimizers -----------------------------------------------------------------------------------


def stay_in_replica(optimizer: Any) -> None:
    """Have an optimizer update the replica's own copies, without leaving its context."""
    for name in _OPTIMIZER_METHODS:
        bind(optimizer, name, _without_tf_optimizer(type(optimizer), name).__get__(optimizer))
    if isinstance(optimizer, LossScaleOptimizer):
        bind(optimizer, "_tf_apply", optimizer._common_apply)


def restore_optimizer(optimizer: Any) -> None:
    unbind(optimizer, *_OPTIMIZER_METHODS, "_tf_apply")


def _without_tf_optimizer(cls: type, name: str) -> Any:
    """A method of an optimizer class as it is without Keras' TFOptimizer."""
    method = getattr(cls, name)
    if method is getattr(TFOptimizer, name):
        return getattr(BaseOptimizer, name)
    if "__class__" not in method.__code__.co_freevars:
        return method
    # It overrides TFOptimizer's and calls it by `super()`, as Nadam does: `super()` looks behind
    # the class in this cell.
    cells = zip(method.__code__.co_freevars, method.__closure__, strict=True)
    closure = tuple(
        types.CellType(TFOptimizer) if cell_name == "__class__" else cell
        for cell_name, cell in cells
    )
    return types.FunctionType(
        method.__code__, method.__globals__, name, method.__defaults__, closure
    )
