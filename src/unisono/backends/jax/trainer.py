"""Train a Keras model on a mesh: the compiler partitions its step over all devices (GSPMD).

State is replicated on the mesh and each batch is sharded over it, so a step is the one-device
program with other shardings: batch norm, clipping, masked losses and dropout masks come out as on
one device. A batch that does not divide is replicated: every device computes all of it, which is
exact as well, and all take over the first one's result, since kernels of GPUs may differ in the
last digits from device to device.

In a run of several processes each gives its rows of the global batch and gets its own copies of
what a step returns, so that a callback may compute with them in one process only. Variables that
were written since the last step take the chief's values in the next one.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter, can_convert_arrays
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight

from unisono.backends.jax.batch_norm import gather_statistics
from unisono.backends.jax.collectives import JaxCollectives
from unisono.backends.jax.cpu_layers import replace_layers, restore_layers
from unisono.backends.jax.devices import trainers
from unisono.backends.jax.framework import JaxFramework
from unisono.backends.jax.gpu_options import step_options
from unisono.backends.jax.internals import uncommitted
from unisono.backends.jax.mesh import mesh_of, peers_watched, tracing_step
from unisono.backends.jax.recurrent import (
    fused_lstms_split,
    is_recurrent,
    restore_loop,
    split_loop,
)
from unisono.backends.jax.state import ModelState
from unisono.backends.jax.throttle import await_turn, note_step
from unisono.data.arrays import without_shards
from unisono.data.feed import Feed, Shard
from unisono.devices import Placement
from unisono.devices.cpu_layers import chosen_cpu_layers
from unisono.hooks import bind, original, unbind
from unisono.keras_internals import jax_function, jax_step, layers_of
from unisono.replication.batch_norm import batch_norms, group_statistics, ungroup_statistics
from unisono.replication.checksums import checksum, compared_variables, names_of
from unisono.replication.interrupts import interrupts_held_back
from unisono.replication.introspection import optimizers_of

_STEPS = ("train_step", "test_step", "predict_step")
_FUNCTIONS = ("train_function", "test_function", "predict_function")
_SYNCS = ("jax_state_sync", "state_sync")  # The second name since Keras 3.16.
_OTHERS = ("predict", "_make_function", "_get_jax_state", "_symbolic_build", *_SYNCS)


class JaxTrainer:
    """A model whose state is replicated on a mesh and whose batches are sharded over it."""

    def __init__(self, model: keras.Model, placement: Placement, *, sync_batch_norm: bool) -> None:
        self.placement = placement
        self.sync_batch_norm = sync_batch_norm
        self._model = model
        self._use_mesh()
        world = self._mesh.world
        self.feed = None if world is None else Feed(world, needs_even_shards=True)
        """The shards of this process in a run of several; None in a single process."""
        self._bind()
        if self.feed is not None:
            self.settle(f"parallel({model.name})")
        else:
            self._place_variables()
        self._forget_functions()
        trainers.add(self)

    def release(self) -> None:
        model = self._model
        unbind(
            model, "predict", *_STEPS, *_OTHERS, *(f"make_{function}" for function in _FUNCTIONS)
        )
        restore_layers(model)
        for layer in batch_norms(model):
            ungroup_statistics(layer)
        for layer in filter(is_recurrent, layers_of(model)):
            restore_loop(layer)
        for variable in self._own_variables():
            variable._value = jax.numpy.asarray(np.asarray(variable._value))
        self._forget_functions()
        trainers.discard(self)

    def variable_names(self) -> list[str]:
        return names_of(self._model)

    def checksums(self) -> list[list[int]]:
        shards = [v._value.addressable_shards for v in compared_variables(self._model)]
        # A value that was just assigned is on one device until the next step.
        return [
            [checksum(found[replica % len(found)].data) for found in shards]
            for replica in range(self._mesh.num_own)
        ]

    def settle(self, when: str) -> None:
        """Give all processes the chief's values of all variables, where no step follows to do it.

        Args:
            when: What has just happened, for error messages.
        """
        if self.feed is None:
            return
        self._state.list_all()
        with self.feed.calling(when):
            self._agree(self.feed, Shard(None, 0, True, 0))
        # A custom training loop may pass them to a step along with arrays of the mesh.
        self._state.convert(uncommitted)

    def move_to_new_devices(self) -> None:
        """Use the devices of a restarted JAX backend under the same indices."""
        self._use_mesh()
        self._place_variables()
        self._forget_functions()

    def _use_mesh(self) -> None:
        self._mesh = mesh_of(self.placement)
        self._state = ModelState(self._model, self._mesh)

    def _place_variables(self) -> None:
        """Show from the start where the values are; a step would move them anyway."""
        for variable in self._own_variables():
            variable._value = self._mesh.put(variable._value)

    def _own_variables(self) -> list[Any]:
        """All variables that have a value."""
        variables = list(self._model.variables)
        variables += self._model.metrics_variables if self._model.compiled else []
        for optimizer in optimizers_of(self._model):
            variables += optimizer.variables
        return [variable for variable in variables if variable._value is not None]

    # -- what Keras' trainer calls -------------------------------------------------------------

    def _bind(self) -> None:
        model = self._model
        self._bind_steps()
        for function in _FUNCTIONS:
            bind(model, f"make_{function}", functools.partial(self._make, function))
        bind(model, "_make_function", self._make_function)
        bind(model, "_get_jax_state", lambda **parts: self._state.get(**parts))
        for name in _SYNCS:
            bind(model, name, lambda: self._state.sync())
        if self.feed is not None:
            bind(model, "_symbolic_build", self._build)
            bind(model, "predict", self._predict)

    def _bind_steps(self) -> None:
        for name in _STEPS:
            bind(self._model, name, self._step(name))

    def _make(self, function: str, force: bool = False) -> Any:
        """Keras' `make_train_function` and the like, of steps and layers prepared for the mesh."""
        if getattr(self._model, function) is None or force:
            # JAX caches what it compiled by function: after another `compile`, new steps keep it
            # from using the loss and metrics from before.
            self._bind_steps()
            self._prepare_layers()
        return original(self._model, f"make_{function}")(force=force)

    def _prepare_layers(self) -> None:
        num_replicas = self.placement.num_replicas
        for layer in batch_norms(self._model):
            group_statistics(layer, 1 if self.sync_batch_norm else num_replicas)
            if self.sync_batch_norm and num_replicas > 1 and not self._is_eager:
                gather_statistics(layer, self._mesh)
        for layer in filter(is_recurrent, layers_of(self._model)):
            if num_replicas > 1 and not self._is_eager:
                split_loop(layer, self._mesh)
        names = chosen_cpu_layers(self.placement, JaxFramework.cpu_layers)
        replace_layers(self._model, names)

    def _forget_functions(self) -> None:
        """Have the next call trace its step again, for the present devices."""
        for function in _FUNCTIONS:
            setattr(self._model, function, None)

    def _step(self, name: str) -> Callable[..., Any]:
        def step(state: Any, data: Any) -> Any:
            if self._is_computed_by_each:
                return original(self._model, name)(state, data)
            given = state
            with tracing_step(self._mesh), fused_lstms_split.applied():
                outputs, state = original(self._model, name)(state, data)
            if self._mesh.size > 1 and not self._mesh.divides(data):
                outputs, state = self._agreed(name, outputs, state, given)
            replicated = self._mesh.replicated
            # The compiler may otherwise choose to shard the state that it returns.
            state = jax.lax.with_sharding_constraint(state, replicated)
            if self._mesh.num_processes > 1:
                # A process can read only what is on its own device.
                outputs = jax.lax.with_sharding_constraint(outputs, replicated)
            return outputs, state

        return step

    def _agreed(self, name: str, outputs: Any, state: Any, given: Any) -> tuple[Any, Any]:
        """The first replica's results of a step that each has computed on all rows."""
        if name == "predict_step":
            return outputs, state  # It changes no variable that the next step reads.
        before = {id(leaf) for leaf in jax.tree.leaves(given)}
        leaves, structure = jax.tree.flatten((outputs, state))
        new = [i for i, leaf in enumerate(leaves) if id(leaf) not in before]
        for i, leaf in zip(new, self._mesh.first_of([leaves[i] for i in new]), strict=True):
            leaves[i] = leaf
        found: tuple[Any, Any] = jax.tree.unflatten(structure, leaves)
        return found

    def _make_function(self, step: Callable[..., Any], **options: Any) -> Any:
        gradient_bytes = sum(v._value.nbytes for v in self._own_variables() if v.trainable)
        more = step_options(self._mesh.own_device, gradient_bytes) if self._mesh.size > 1 else {}
        run = self._placed(jax_step(self._model, step, **more))
        return jax_function(self._model, run, **options)

    def _placed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(state: Any, data: Any) -> Any:
            # The variables, not `state`, are the truth: a callback may have written to a layer.
            # They are written after each step, since it frees the values that they had before.
            self._state.list_like(state)
            shard = self._next_shard(data)
            with peers_watched():
                if self._mesh.is_cpu:
                    await_turn()
                with interrupts_held_back():
                    if self._is_computed_by_each:
                        outputs, state = step(self._state.held(), self._gathered(shard))
                        self._state.publish(state, is_placed=False)
                    else:
                        outputs, state = step(self._state.take(), self._mesh.place(shard))
                        self._state.publish(state)
                if self.feed is not None:
                    outputs = keras.tree.map_structure(self._mesh.result, outputs)
                if self._mesh.is_cpu:
                    note_step(outputs, state)
            return outputs, state

        return run

    @property
    def _is_eager(self) -> bool:
        return bool(self._model.run_eagerly or not self._model.jit_compile)

    @property
    def _is_computed_by_each(self) -> bool:
        """Whether every process computes the whole step on its own device.

        Operations that run one by one on arrays of all processes would synchronize them each time.
        """
        return self._is_eager and self._mesh.num_processes > 1

    # -- several processes ---------------------------------------------------------------------

    def _next_shard(self, data: Any) -> Shard:
        """This process' rows of a batch that all processes have agreed on."""
        if self.feed is None:
            return self._mesh.as_shard(data)
        shard = self.feed.shard(data)
        self._agree(self.feed, shard)
        return shard

    def _agree(self, feed: Feed, shard: Shard) -> None:
        """Compare a step between the processes, and take over what the chief has written."""
        positions = feed.agree(shard, self._state.changed(), self._describe)
        if not positions:
            return
        variables = self._state.variables()
        values = [variables[position]._value for position in positions]
        chiefs = JaxCollectives(self._mesh).broadcast(values, root=0)
        self._state.accept(positions, chiefs)

    def _describe(self) -> list[str]:
        return [f"{v.path} {v.dtype} {tuple(v.shape)}" for v in self._state.variables()]

    def _gathered(self, shard: Shard) -> Any:
        """The global batch in every process."""
        collectives = JaxCollectives(self._mesh)

        def gather(leaf: Any) -> Any:
            if leaf is None or not self._mesh.is_split(shard, np.shape(leaf)):
                return leaf
            return jax.numpy.concatenate(collectives.all_gather(leaf))

        return keras.tree.map_structure(gather, shard.data)

    def _build(self, iterator: Any = None, data_batch: Any = None) -> Any:
        # By the shapes of a global batch, which a step sees: a stateful RNN has one state a row.
        batches = None if iterator is None else without_shards(iterator, self._global_spec)
        return original(self._model, "_symbolic_build")(batches, data_batch)

    def _global_spec(self, shard: Shard) -> Any:
        def spec(leaf: Any) -> Any:
            if leaf is None:
                return None
            is_split = self._mesh.is_split(shard, leaf.shape)
            shape = (shard.num_rows, *leaf.shape[1:]) if is_split else leaf.shape
            return keras.KerasTensor(shape, leaf.dtype)

        return keras.tree.map_structure(spec, shard.data)

    def _predict(self, x: Any, batch_size: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Keras builds a model from a first batch, and would be given a shard.
        is_built = all(layer.built for layer in self._model._flatten_layers())
        if not is_built and can_convert_arrays(x):
            batches = ArrayDataAdapter(x, batch_size=batch_size).get_jax_iterator()
            with keras.StatelessScope():
                self._model(unpack_x_y_sample_weight(next(iter(batches)))[0])
        return original(self._model, "predict")(x, batch_size, *args, **kwargs)
