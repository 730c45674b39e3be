"""Models made under a scope, and custom training loops, on every replica.

The scope adopts models as `parallel` does: when they are compiled inside it, or when it ends. The
parts of a loop (data, step, reduction) mean the same on each backend, though a step sees one
replica's rows on TensorFlow and torch, and the global batch on JAX.
"""

import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from unisono.backends import CustomLoop, load_backend
from unisono.devices import Placement, claimed_replicas
from unisono.errors import StrategyError
from unisono.hooks import Patch
from unisono.parallel import check_call, is_parallel, place, spread


class LoopObserver(Protocol):
    """Is called around each batch of a distributed data set: the steps of a custom loop."""

    def before(self, batch: Any, num_rows: int) -> None:
        """A global batch is about to be given to the loop."""

    def after(self) -> bool:
        """The loop asks for the next one; returns whether it is to get any."""


loop_observers: list[LoopObserver] = []
"""Those of `unisono verify`."""
_innermost = threading.local()
_last: "Strategy | None" = None


class Strategy:
    """The replicas of a program: for models made under `scope`, and for custom training loops.

    Its methods have the names and the meaning of `tf.distribute.Strategy`, on every backend.

    Args:
        gpus: The number of GPUs, or a list of their ids.
        replicas: The number of replicas: that many GPUs, or CPU replicas on a machine without GPUs.
        sync_batch_norm: Whether batch normalization uses the statistics of the global batch, as on
            one device.

    Raises:
        ConfigurationError: If the devices do not exist, or the backend has already started with
            others.

    Example:
        >>> import keras, numpy as np
        >>> strategy = Strategy(replicas=2)
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> x, y = np.ones((16, 4)), np.ones((16, 1))
        >>> history = model.fit(x, y, batch_size=4 * strategy.num_replicas_in_sync, verbose=0)
        unisono: ... 2 replicas on cpu 0, 1; global batch 8 = 2 x 4 per replica
    """

    def __init__(
        self,
        *,
        gpus: int | Sequence[int] | None = None,
        replicas: int | None = None,
        sync_batch_norm: bool = True,
    ) -> None:
        self._use(place(replicas=replicas, gpus=gpus), sync_batch_norm)

    def _use(self, placement: Placement, sync_batch_norm: bool) -> None:
        import keras

        global _last
        backend = load_backend(keras.backend.backend())
        backend.prepare(placement)
        self._placement = placement
        self._loop: CustomLoop = backend.custom_loop(placement)
        self._sync_batch_norm = sync_batch_norm
        _last = self

    def __repr__(self) -> str:
        return f"Strategy({self.num_replicas_in_sync} replicas on {self._placement})"

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas, in all processes of the run: scale the global batch with it.

        Example:
            >>> Strategy(replicas=2).num_replicas_in_sync
            2
        """
        return claimed_replicas(self._loop.num_replicas)

    @contextmanager
    def scope(self) -> Iterator["Strategy"]:
        """Train the models that are made or compiled inside a `with` block on the replicas.

        Returns:
            A context manager, whose value is the strategy.

        Example:
            >>> import keras
            >>> with Strategy(replicas=2).scope():
            ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            ...     model.compile("sgd", "mse")
        """
        before = {id(model) for model in _living_models()}
        outer = getattr(_innermost, "strategy", None)
        _innermost.strategy = self
        try:
            with _adopting_at_compile.applied():
                yield self
        finally:
            _innermost.strategy = outer
        from unisono.keras_internals import layers_of

        made = [model for model in _living_models() if id(model) not in before]
        inner = {id(layer) for model in made for layer in layers_of(model, include_self=False)}
        for model in made:
            if id(model) not in inner and not is_parallel(model):
                self.adopt(model)

    def adopt(self, model: Any) -> Any:
        """Train a model that exists already on the replicas, as `unisono.parallel` does.

        Args:
            model: A Keras model.

        Returns:
            The model itself.

        Raises:
            ModelError: If `model` is not a Keras model.

        Example:
            >>> import keras
            >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            >>> Strategy(replicas=2).adopt(model) is model
            True
        """
        return spread(model, self._placement, sync_batch_norm=self._sync_batch_norm)

    def distribute_dataset(self, dataset: Any) -> "DistributedDataset":
        """Split each global batch of a data set over the replicas.

        Args:
            dataset: A `tf.data.Dataset`, a torch `DataLoader`, a `keras.utils.PyDataset` or any
                other iterable of batches. In a run all processes give the same global batches.

        Returns:
            An iterable of batches, to be given to `run`.

        Raises:
            StrategyError: If `dataset` is no iterable, or its elements are not batches.

        Example:
            >>> import numpy as np
            >>> strategy = Strategy(replicas=1)
            >>> batches = strategy.distribute_dataset([np.ones((4, 2)), np.ones((4, 2))])
            >>> len(batches)
            2
        """
        return DistributedDataset(self._loop, dataset)

    def run(
        self,
        step: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a step on every replica.

        On TensorFlow and torch the step sees one replica's rows of a distributed batch, on JAX the
        global batch, which the compiler splits.

        Args:
            step: A function.
            args: Its positional arguments: batches of `distribute_dataset` and other values.
            kwargs: Its arguments by name.

        Returns:
            What the step returned on each replica, to be given to `reduce` or `gather`.

        Raises:
            StrategyError: If `step` cannot be called, or not with `args` and `kwargs`.

        Example:
            >>> import numpy as np
            >>> strategy = Strategy(replicas=1)
            >>> (batch,) = strategy.distribute_dataset([np.ones((4, 2), "float32")])
            >>> result = strategy.run(lambda x: x + 1, args=(batch,))
            >>> tuple(strategy.gather(result).shape)
            (4, 2)
        """
        check_call("run", step, args, kwargs)
        return self._loop.run(step, args, kwargs or {})

    def reduce(self, how: Any, value: Any, axis: int | None = None) -> Any:
        """Reduce what `run` returned over the replicas.

        Args:
            how: `"sum"` or `"mean"`, or TensorFlow's `tf.distribute.ReduceOp`.
            value: What `run` returned.
            axis: An axis to reduce as well: 0 for a result with rows.

        Returns:
            The sum or mean, the same on every replica.

        Raises:
            StrategyError: If `how` is neither.

        Example:
            >>> import numpy as np
            >>> strategy = Strategy(replicas=1)
            >>> (batch,) = strategy.distribute_dataset([np.ones((4,), "float32")])
            >>> float(strategy.reduce("sum", strategy.run(lambda x: x, args=(batch,)), axis=0))
            4.0
        """
        name = str(getattr(how, "value", how)).lower()
        if name not in ("sum", "mean"):
            raise StrategyError(f'Asked to reduce by {how!r}. Use "sum" or "mean".')
        return self._loop.reduce(name, value, axis)

    def gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenate what `run` returned on all replicas, in replica order.

        Args:
            value: What `run` returned, with rows.
            axis: The axis along which to concatenate.

        Returns:
            The rows of the global batch, the same on every replica.

        Example:
            >>> import numpy as np
            >>> strategy = Strategy(replicas=1)
            >>> (batch,) = strategy.distribute_dataset([np.ones((4, 2), "float32")])
            >>> tuple(strategy.gather(strategy.run(lambda x: x, args=(batch,))).shape)
            (4, 2)
        """
        return self._loop.gather(value, axis)

    def reduce_gradients(self, gradients: Any) -> Any:
        """Gradients of the global batch, to be clipped or accumulated before they are applied.

        On TensorFlow and torch a step computes the gradients of one replica's rows, and optimizers
        reduce them over the replicas when they are applied. What a loop does to gradients before
        that, it does to a part. This call reduces them at once, weighted as the optimizers do.
        From the first call on, optimizers apply gradients as they are, so a loop passes all of its
        gradients through it. On JAX gradients are those of the global batch already.

        Args:
            gradients: A list of gradients; on TensorFlow with `IndexedSlices` and `None` among
                them. On torch also a model, or a list of parameters or variables, whose `.grad` is
                then reduced in place.

        Returns:
            The list of reduced gradients.

        Raises:
            StrategyError: Outside of a step on TensorFlow, and when an optimizer later is given
                gradients that differ between replicas.

        Example:
            >>> from keras import ops
            >>> strategy = Strategy(replicas=1)
            >>> (gradient,) = strategy.run(lambda: strategy.reduce_gradients([ops.ones(2)]))
            >>> gradient.shape[0]
            2
        """
        return self._loop.reduce_gradients(gradients)

    def replicate(self, state: Any) -> Any:
        """Put the state of a step on every replica.

        JAX's stateless loops begin with it; on TensorFlow and torch it changes nothing.

        Args:
            state: Variables or arrays, in any structure.

        Returns:
            The same structure, replicated.

        Example:
            >>> import numpy as np
            >>> tuple(Strategy(replicas=1).replicate([np.ones(3)])[0].shape)
            (3,)
        """
        return self._loop.replicate(state)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return what `run` returned on each replica of this process.

        Args:
            value: What `run` returned.

        Returns:
            A tuple with one entry per replica.

        Example:
            >>> strategy = Strategy(replicas=1)
            >>> strategy.experimental_local_results(strategy.run(lambda: 7))
            (7,)
        """
        return self._loop.local_results(value)

    # Names of TensorFlow 2.0.
    experimental_distribute_dataset = distribute_dataset
    experimental_run_v2 = run


class DistributedDataset:
    """The batches of a data set, each split over the replicas."""

    def __init__(self, loop: CustomLoop, dataset: Any) -> None:
        self._loop = loop
        self._dataset = dataset
        spec = getattr(dataset, "element_spec", None)
        if spec is not None:
            _check_batched(spec)
        if not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
            raise StrategyError(
                f"Asked to distribute a {type(dataset).__name__}. Give batches: a tf.data.Dataset, "
                "a torch DataLoader, a keras PyDataset, or any iterable of batches."
            )

    def __iter__(self) -> Iterator[Any]:
        from unisono.data.feed import agree_on_batch
        from unisono.launch.client import current_world

        self._loop.begin_epoch()
        world = current_world()
        for number, batch in enumerate(_batches(self._dataset), start=1):
            num_rows = _check_batched(batch)
            if world is not None:
                topic = f"batch {number} of a distributed data set"
                agree_on_batch(world, topic, batch, num_rows)
            for observer in loop_observers:
                observer.before(batch, num_rows)
            yield self._loop.split(batch, num_rows)
            goes_on = [observer.after() for observer in loop_observers]
            if not all(goes_on):
                break
        if world is not None:
            world.all_gather("end of a distributed data set", None)
        self._loop.end_epoch()

    def __len__(self) -> int:
        return len(self._dataset)


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | None = None
) -> Any:
    """Average a loss over the global batch, in the step of a custom training loop.

    A replica gets the sum over its own rows, divided by the rows of the global batch. So the sum
    over replicas is the loss of the global batch: minimize it, and reduce it with `"sum"`.

    Args:
        per_example_loss: One value per row, as a loss with `reduction=None` returns.
        sample_weight: One weight per row.
        global_batch_size: The number to divide by; by default the rows of this global batch.

    Returns:
        A scalar tensor.

    Raises:
        StrategyError: If the loss has no rows, or is no tensor of numbers.

    Example:
        >>> float(compute_average_loss([1.0, 2.0, 3.0], global_batch_size=4))
        1.5
    """
    from keras import ops

    loss = _to_tensor(per_example_loss, "a loss")
    if len(loss.shape) == 0:
        raise StrategyError(
            "Asked for the average of a loss without rows, shape (). Give one value per example: "
            "make the loss with reduction=None."
        )
    if sample_weight is not None:
        weight = ops.cast(_to_tensor(sample_weight, "sample weights"), loss.dtype)
        missing = len(loss.shape) - len(weight.shape)
        loss = loss * ops.reshape(weight, (*ops.shape(weight), *[1] * missing))
    loop = _current_loop()
    rows = global_batch_size
    if rows is None:
        rows = loop.num_rows() if loop is not None else None
    if rows is None:
        rows = ops.shape(loss)[0]
    average = ops.sum(loss) / ops.cast(rows, loss.dtype)
    return average if loop is None else loop.part_of_sum(average)


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """Divide a loss that does not depend on the batch by the number of replicas.

    Every replica computes it from the same weights, so the sum over replicas counts it once.

    Args:
        regularization_loss: A number, a tensor or a list, such as `model.losses`; it is summed.

    Returns:
        A scalar tensor, to be added to `compute_average_loss`.

    Raises:
        StrategyError: If it is no tensor of numbers.

    Example:
        >>> float(scale_regularization_loss([1.0, 2.0]))
        3.0
    """
    from keras import ops

    total = ops.sum(_to_tensor(regularization_loss, "a regularization loss"))
    loop = _current_loop()
    return total if loop is None else loop.part_of_sum(total / loop.num_parts())


def _to_tensor(value: Any, what: str) -> Any:
    from keras import ops

    try:
        if value is None or isinstance(value, (str, bytes)):
            raise TypeError(f"found a {type(value).__name__}")
        return ops.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise StrategyError(
            f"Asked for the average of {value!r} as {what}: {error}. Give a tensor of numbers."
        ) from error


def _current_loop() -> CustomLoop | None:
    """The loop of the strategy in use; only a running step makes a difference."""
    strategy = getattr(_innermost, "strategy", None) or _last
    return None if strategy is None else strategy._loop


def _living_models() -> list[Any]:
    import keras

    return [o for o in gc.get_objects() if issubclass(type(o), keras.Model)]


def _adopting(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Adopt a model when it is compiled, as it may be trained before its scope ends.

    Keras has no event for it. Its method is replaced for as long as a scope is open.
    """

    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = getattr(_innermost, "strategy", None)
        if strategy is not None and not is_parallel(self):
            strategy.adopt(self)
        return plain(self, *args, **kwargs)

    return compile


def _model_class() -> Any:
    import keras

    return keras.Model


_adopting_at_compile = Patch(_model_class, "compile", _adopting)


def _batches(dataset: Any) -> Iterator[Any]:
    import keras

    if isinstance(dataset, keras.utils.PyDataset):
        if dataset.num_batches is None:
            raise StrategyError(
                "Asked to distribute a PyDataset without an end. Give it a `num_batches`."
            )
        return (dataset[i] for i in range(dataset.num_batches))
    return iter(dataset)


def _check_batched(batch: Any) -> int:
    """The rows of a global batch; StrategyError where its parts have none, or not as many."""
    import keras

    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
    if not shapes or any(not shape for shape in shapes):
        raise StrategyError(
            f"Asked to distribute data whose elements have shapes {shapes}: some have no rows. "
            "Batch it first, with `dataset.batch(...)` or a DataLoader's batch_size."
        )
    if len({shape[0] for shape in shapes}) > 1:
        raise StrategyError(
            f"Asked to distribute a batch whose parts have {[s[0] for s in shapes]} rows. Every "
            "part of a batch needs the same number of rows."
        )
    return shapes[0][0] if isinstance(shapes[0][0], int) else 0
