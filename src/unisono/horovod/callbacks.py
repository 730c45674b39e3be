"""Horovod's callbacks, for `fit` with a `DistributedOptimizer`."""

from collections.abc import Callable, Iterable
from typing import Any

import keras

from unisono.horovod.collectives import reduce_all
from unisono.horovod.execution import Collective
from unisono.horovod.reductions import Average
from unisono.horovod.session import global_process_set, session
from unisono.horovod.variables import broadcast_variables, variables_of

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcasts the weights and the optimizer's state of one process before the first step.

    If the model is built by its first batch, after that batch.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        one = local_variables if isinstance(local_variables, keras.Variable) else None
        self._local = {id(each) for each in ([one] if one is not None else local_variables or ())}

    def register_local_var(self, variable: Any) -> None:
        """Do not broadcast this variable."""
        self._local.add(id(variable))

    def on_train_begin(self, logs: Any = None) -> None:
        model = self.model
        if not self.broadcast_done and model.built and getattr(model.optimizer, "built", True):
            self._broadcast(model)

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.broadcast_done:
            self._broadcast(self.model)

    def _broadcast(self, model: Any) -> None:
        shared = [each for each in variables_of(model) if id(each) not in self._local]
        broadcast_variables(shared, self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the metrics of an epoch over all processes; callbacks after it see the averages.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> logs = {"loss": 2.0}
    >>> hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    >>> logs
    {'loss': 2.0}
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not logs or session().size == 1:
            return
        names = sorted(logs)
        # The names are part of the request: processes with other metrics raise an error.
        collective = Collective(
            "allreduce", global_process_set, f"metrics {', '.join(names)}", tuple(names), Average
        )
        values = [keras.ops.convert_to_tensor(float(logs[name]), "float32") for name in names]
        for name, average in zip(names, reduce_all(collective, values), strict=True):
            logs[name] = float(average)


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr * multiplier(epoch)` from one epoch to another.

    With `staircase` once per epoch, else before each batch with a fraction of an epoch. A number
    as `multiplier` decays the rate by that factor each epoch. When the rate changes, momentum is
    corrected for it, as in "Accurate, Large Minibatch SGD".

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> callback = hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier=0.9)
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Received initial_lr=None. Give the initial learning rate.")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self.multiplier: Callable[[float], float]
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            factor = multiplier
            self.multiplier = lambda epoch: float(factor ** (epoch - start_epoch))

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    "The number of steps of an epoch is unknown for this data. Give "
                    f"steps_per_epoch= to {type(self).__name__}."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.current_epoch < self.start_epoch:
            return
        if self.end_epoch is not None and self.current_epoch >= self.end_epoch:
            return
        if not self.staircase:
            assert self.steps_per_epoch
            self._set_rate(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set_rate(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = _rate(self.model.optimizer)

    def _set_rate(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old, new = _rate(optimizer), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        if self.momentum_correction and old and new != old:
            _scale_momentum(optimizer, new / old)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size()` to `initial_lr` in the first epochs.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> callback = hvd.callbacks.LearningRateWarmupCallback(0.1 * hvd.size(), warmup_epochs=3)
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch
            size = session().size
            # One step ahead, as in Horovod: the last step of the warm-up has the full rate.
            progress = (epoch + 1 / self.steps_per_epoch) / warmup_epochs
            return (progress * (size - 1) + 1) / size

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and session().rank == 0 and epoch + 1 == self.end_epoch:
            rate = _rate(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: the learning rate has warmed up to {rate:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keeps the best model of the training; rank 0 writes it to `filepath`.

    `filepath` may be set after construction, as Horovod's estimators do. Put
    `MetricAverageCallback` before it, so that the best is the best of all processes.

    >>> import unisono.horovod as hvd
    >>> hvd.init()
    >>> callback = hvd.callbacks.BestModelCheckpoint(filepath="best.keras")
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | None = None,
    ) -> None:
        unset = "unset.weights.h5" if save_weights_only else "unset.keras"
        super().__init__(
            filepath or unset,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: Any = None) -> None:
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint has no filepath. Set it, or give filepath=.")
        super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if session().rank == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if session().rank == 0:
            super().on_epoch_end(epoch, logs)


def _rate(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def _scale_momentum(optimizer: Any, factor: float) -> None:
    """Scale velocities, which contain the old learning rate, to the new one.

    Equal to Horovod's scaling of momentum for one step; in Keras 3 momentum is a constant of the
    compiled step, and velocities are variables.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(optimizer, keras.optimizers.SGD | keras.optimizers.RMSprop):
        for variable in optimizer.variables:
            if variable.name.endswith("_momentum"):
                variable.assign(variable.value * factor)
