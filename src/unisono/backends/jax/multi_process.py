"""A model on JAX in a run of several processes: the compiler splits the step over all of them.

As on the devices of one process, a step is the one-device program with other layouts. What differs
is how arrays come and go: a process gives its rows of the global batch and sees its own copies of
what a step returns, so that a callback may compute with them in one process only. Variables that
were written since the last step are the chief's in the next one.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter, can_convert_arrays
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight

from unisono.backends.jax.batch_norm import tracing_step
from unisono.backends.jax.collectives import JaxCollectives
from unisono.backends.jax.functions import bind_makers, rebuild_functions, unbind_makers
from unisono.backends.jax.global_mesh import peers_watched, uncommitted, world_mesh
from unisono.backends.jax.state import KnownValues, StepState
from unisono.backends.jax.throttle import await_turn, note_step
from unisono.data.arrays import unshared
from unisono.data.feed import Feed, Shard
from unisono.devices import Placement
from unisono.hooks import bind, original, unbind
from unisono.keras_internals import jax_function, jax_step
from unisono.replication.checksums import names_of, own_checksums
from unisono.replication.interrupts import interrupts_held_back

_STEPS = ("train_step", "test_step", "predict_step")
_OTHERS = (
    "_make_function",
    "_get_jax_state",
    "jax_state_sync",
    "state_sync",
    "_symbolic_build",
)
_known = KnownValues()


class JaxWorldReplicas:
    """A model whose state lies on every process' device, and whose batches are split over them."""

    def __init__(self, model: keras.Model, placement: Placement, *, sync_batch_norm: bool) -> None:
        self.placement = placement
        self.sync_batch_norm = sync_batch_norm
        self._model = model
        self._mesh = world_mesh(placement.kind)
        self._collectives = JaxCollectives(kind=placement.kind)
        self._state = StepState(model, self._mesh, _known)
        self.feed = Feed(self._mesh.world, needs_even_shards=True)
        steps = {name: functools.partial(self._step, name) for name in _STEPS}
        bind_makers(model, placement, lambda: self._mesh, steps, sync_batch_norm=sync_batch_norm)
        bind(model, "_make_function", self._make_function)
        bind(model, "_get_jax_state", self._state.get)
        for name in ("jax_state_sync", "state_sync"):  # The other name since Keras 3.16.
            bind(model, name, self._state.sync)
        bind(model, "_symbolic_build", self._build)
        bind(model, "predict", self._predict)
        rebuild_functions(model)
        self.settle(f"parallel({model.name})")

    def release(self) -> None:
        unbind(self._model, *_STEPS, *_OTHERS, "predict")
        unbind_makers(self._model)
        self._list_all()
        for variable in self._state.variables():
            variable._value = jax.numpy.asarray(np.asarray(variable._value))
        rebuild_functions(self._model)

    def variable_names(self) -> list[str]:
        return names_of(self._model)

    def checksums(self) -> list[list[int]]:
        return [own_checksums(self._model)]

    def _predict(self, x: Any, batch_size: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Keras would build a model by a first batch, and find a shard of one.
        is_built = all(layer.built for layer in self._model._flatten_layers())
        if not is_built and can_convert_arrays(x):
            batches = ArrayDataAdapter(x, batch_size=batch_size).get_jax_iterator()
            with keras.StatelessScope():
                self._model(unpack_x_y_sample_weight(next(iter(batches)))[0])
        return original(self._model, "predict")(x, batch_size, *args, **kwargs)

    def settle(self, when: str) -> None:
        """Take over the chief's values of all variables, where no step follows to do it."""
        self._list_all()
        with self.feed.calling(when):
            self._agree(Shard(None, 0, True, 0))
        # A custom training loop may take them along with arrays of the mesh.
        self._state.show_as(uncommitted)

    def _list_all(self) -> None:
        is_compiled = bool(self._model.compiled and self._model.optimizer is not None)
        self._state.get(
            trainable_variables=True,
            non_trainable_variables=True,
            optimizer_variables=is_compiled,
            metrics_variables=is_compiled,
        )

    # -- what Keras' trainer calls -------------------------------------------------------------

    def _step(self, name: str) -> Callable[..., Any]:
        def step(state: Any, data: Any) -> Any:
            if self._is_eager:
                return original(self._model, name)(state, data)
            with tracing_step():
                results = original(self._model, name)(state, data)
            # Whole on every device: a process can only see what lies on its own.
            return jax.lax.with_sharding_constraint(results, self._mesh.replicated)

        return step

    def _make_function(self, step: Callable[..., Any], **options: Any) -> Any:
        run = self._placed(jax_step(self._model, step))
        return jax_function(self._model, run, **options)

    def _placed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(state: Any, data: Any) -> Any:
            self._state.list_like(state)
            share = self.feed.shard(data)
            self._agree(share)
            with peers_watched():
                if self.placement.kind == "cpu":
                    await_turn()
                with interrupts_held_back():
                    if self._is_eager:
                        outputs, state = step(self._state.seen(), self._whole(share))
                    else:
                        outputs, state = step(self._state.take(), self._mesh.place(share))
                    self._state.publish(state, is_placed=not self._is_eager)
                outputs = keras.tree.map_structure(self._mesh.result, outputs)
                if self.placement.kind == "cpu":
                    note_step(outputs, state)
            return outputs, state

        return run

    def _build(self, iterator: Any = None, data_batch: Any = None) -> Any:
        # A step sees the global batch, whose rows a stateful layer counts.
        batches = None if iterator is None else unshared(iterator, self._global_spec)
        return original(self._model, "_symbolic_build")(batches, data_batch)

    def _global_spec(self, share: Shard) -> Any:
        """Tensors with the shapes of a global batch of which this process has a share."""
        num_own = share.num_rows if share.is_replicated else share.num_rows // self._mesh.size

        def spec(leaf: Any) -> Any:
            if leaf is None:
                return None
            is_split = len(leaf.shape) > 0 and leaf.shape[0] == num_own
            shape = (share.num_rows, *leaf.shape[1:]) if is_split else leaf.shape
            return keras.KerasTensor(shape, leaf.dtype)

        return keras.tree.map_structure(spec, share.data)

    @property
    def _is_eager(self) -> bool:
        return bool(self._model.run_eagerly or not self._model.jit_compile)

    # -- agreement -----------------------------------------------------------------------------

    def _agree(self, share: Shard) -> None:
        """Meet all processes before a step, and take over what the chief has written."""
        places = self.feed.agree(share, self._state.changed(), self._describe)
        if not places:
            return
        variables = self._state.variables()
        own = [variables[place]._value for place in places]
        self._state.accept(places, self._collectives.broadcast(own, root=0))

    def _describe(self) -> list[str]:
        return [f"{v.path} {v.dtype} {tuple(v.shape)}" for v in self._state.variables()]

    def _whole(self, share: Shard) -> Any:
        """A global batch in each process, for steps that are not compiled.

        Operations that run one by one on arrays of all processes would cost a meeting each, so
        every process computes all of such a step.
        """
        if share.is_replicated:
            return share.data
        num_own = share.num_rows // self._mesh.size

        def gather(leaf: Any) -> Any:
            if leaf is None or np.ndim(leaf) == 0 or len(leaf) != num_own:
                return leaf
            return jax.numpy.concatenate(self._collectives.all_gather(leaf))

        return keras.tree.map_structure(gather, share.data)
