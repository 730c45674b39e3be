"""Optimizers of `torch.optim` on replicas: their gradients are all-reduced before they step.

torch calls a hook of ours before the `step` of any optimizer. A GradScaler checks for overflows
before it steps and may skip the step, so gradients are reduced before that check: otherwise one
process could step while another does not. The weights of a reduction sum to one, so gradients that
were reduced before (by Horovod or DistributedDataParallel) stay as they are.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unisono.backends.torch.process_group import world_group
from unisono.backends.torch.replica import TorchReplica, check_equal, current_replica
from unisono.errors import DisagreementError, StrategyError
from unisono.launch.client import World
from unisono.replication.callback_ranks import is_alone
from unisono.replication.step import gradient_weight, some_of

_SCALER_METHODS = ("step", "unscale_")
# By optimizer and by the ids of its parameters: those whose gradients are reduced.
_known: weakref.WeakKeyDictionary[Any, dict[Any, list[Any]]] = weakref.WeakKeyDictionary()
_is_hooked = False
_for_good = ExitStack()


@contextmanager
def hooked(world: World | None = None) -> Iterator[None]:
    """Reduce the gradients of torch's own optimizers inside the scope, while a step runs.

    In a process of a run (`world`) also outside of steps, with the same weight for every process.
    """
    global _is_hooked
    if _is_hooked:
        yield
        return
    _is_hooked = True
    scaler = torch.amp.GradScaler
    plain = {name: getattr(scaler, name) for name in _SCALER_METHODS}
    handle = register_optimizer_step_pre_hook(lambda *call: _before_step(world, *call))
    for name, method in plain.items():
        setattr(scaler, name, _reducing_first(method, world))
    try:
        yield
    finally:
        handle.remove()
        for name, method in plain.items():
            setattr(scaler, name, method)
        _is_hooked = False


def hook_for_good(world: World) -> None:
    """Do so in this process of a run until it ends."""
    _for_good.enter_context(hooked(world))


def reduce_in_place(
    replica: TorchReplica, parameters: Iterable[Any], optimizer: Any = None
) -> None:
    """Make the `.grad` of parameters that of the global batch."""
    parameters = list(parameters)
    # Not `is_weighted`: where every replica runs the whole batch, sums are not weighted yet.
    is_weighted = replica.state.adds_up or bool(replica.state.weighted_optimizers)
    weight = 1.0 if is_weighted else gradient_weight(replica, optimizer)
    own = [parameter.grad for parameter in parameters]
    reduced = replica.reduce_gradients(own, parameters, weight)
    for parameter, gradient in zip(parameters, reduced, strict=True):
        if gradient is None or parameter.grad is None or parameter.grad.is_sparse:
            parameter.grad = gradient
        else:
            parameter.grad.copy_(gradient)


def native_state(model: Any) -> list[tuple[str, Any]]:
    """The state that torch's own optimizers keep for a model's parameters, with names, sorted.

    There is no registry of optimizers, so all objects of the process are searched.
    """
    variables = {id(variable.value): variable for variable in model.variables}
    found = []
    for optimizer in gc.get_objects():
        if issubclass(type(optimizer), torch.optim.Optimizer):
            for parameter in _all_parameters(optimizer):
                if id(parameter) in variables:
                    path = f"{type(optimizer).__name__}/{variables[id(parameter)].path}"
                    state = optimizer.state.get(parameter, {})
                    found += [(f"{path}/{name}", value) for name, value in state.items()]
    tensors = [(name, value) for name, value in found if isinstance(value, torch.Tensor)]
    return sorted(tensors, key=lambda entry: entry[0])


def _before_step(world: World | None, optimizer: Any, args: Any, kwargs: Any) -> Any:
    replica = _replica(world)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if replica is not None and replica.state.trial is not None:
        _try_step(replica, optimizer, has_closure=closure is not None)
        return None
    if replica is None or not (parameters := _reduced_parameters(optimizer, replica, world)):
        return None
    state = replica.state
    state.has_trained = True
    state.trained.update(map(id, parameters))
    if closure is not None:
        # LBFGS calls it several times per step, depending on what it returns.
        def global_closure() -> Any:
            loss = closure()
            if not state.are_gradients_reduced:
                reduce_in_place(replica, parameters, optimizer)
            return None if loss is None else _mean(replica, loss)

        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return (optimizer, global_closure, *args[2:]), rest
    if state.are_gradients_reduced:
        replica.check_reduced(optimizer, [parameter.grad for parameter in parameters])
    elif id(optimizer) not in state.unscaled:
        reduce_in_place(replica, parameters, optimizer)
    return None


def _try_step(replica: TorchReplica, optimizer: Any, *, has_closure: bool) -> None:
    """Record the gradients of a step that is only tried, and leave none for it to apply."""
    if has_closure:
        raise StrategyError("A step of an optimizer with a closure cannot be tried.")
    assert replica.state.trial is not None
    parameters = _all_parameters(optimizer)
    reduce_in_place(replica, parameters, optimizer)
    noted = replica.state.trial.gradients.setdefault(id(optimizer), [])
    noted.extend(some_of(parameter.grad) for parameter in parameters)
    for parameter in parameters:
        parameter.grad = None


def _reducing_first(plain: Callable[..., Any], world: World | None) -> Callable[..., Any]:
    """A method of GradScaler that first reduces the gradients of its optimizer."""

    def method(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        replica = _replica(world) if scaler.is_enabled() else None
        if replica is None:
            return plain(scaler, optimizer, *args, **kwargs)
        if replica.state.trial is not None:
            raise StrategyError("A step that scales its loss by a GradScaler cannot be tried.")
        unscaled = replica.state.unscaled
        if id(optimizer) not in unscaled:
            unscaled.add(id(optimizer))
            if not replica.state.are_gradients_reduced:
                parameters = _reduced_parameters(optimizer, replica, world)
                reduce_in_place(replica, parameters, optimizer)
        try:
            return plain(scaler, optimizer, *args, **kwargs)
        finally:
            if plain.__name__ == "step":
                unscaled.discard(id(optimizer))

    return method


def _replica(world: World | None) -> TorchReplica | None:
    """The one whose step runs; outside of steps, one with the same weight as any other."""
    replica = current_replica()
    if replica is None and world is not None and world.is_ours and not is_alone():
        group = world_group()
        replica = TorchReplica(group, group.size)
    return replica


def _reduced_parameters(optimizer: Any, replica: TorchReplica, world: World | None) -> list[Any]:
    """An optimizer's parameters that all replicas hold: all but tensors outside of models."""
    every = _all_parameters(optimizer)
    is_in_step = current_replica() is not None
    key = (is_in_step, *map(id, every))
    known = _known.setdefault(optimizer, {})
    if key not in known:
        owned = _of_keras() | _of_modules() if is_in_step else _of_keras()
        parameters = [parameter for parameter in every if id(parameter) in owned]
        if parameters and world is not None:
            _agree(world, parameters)
            check_equal(replica, parameters)
        known[key] = parameters
    return known[key]


def _agree(world: World, parameters: list[Any]) -> None:
    """Raise DisagreementError where processes step different optimizers, before a collective."""
    own = [f"{tuple(parameter.shape)} {parameter.dtype}" for parameter in parameters]
    every = world.all_gather("first step of an optimizer of torch", own)
    for rank, other in enumerate(every):
        if other != every[0]:
            raise DisagreementError(
                f"Rank {rank} steps an optimizer with parameters {other}, and rank 0 one with "
                f"{every[0]}. In a run every process trains the same model: build and step the "
                "same optimizers in the same order on each."
            )


def _all_parameters(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _of_keras() -> set[int]:
    """Ids of the values of this process' Keras variables."""
    found = [o for o in gc.get_objects() if issubclass(type(o), keras.Variable)]
    return {id(variable._value) for variable in found}


def _of_modules() -> set[int]:
    found = [o for o in gc.get_objects() if issubclass(type(o), torch.nn.Module)]
    # Not `module.parameters()`: on a layer of Keras without a ParameterDict, that makes one.
    return {id(p) for module in found for p in module._parameters.values()}


def _mean(replica: TorchReplica, loss: Any) -> Any:
    weight = 1.0 if replica.state.is_weighted else replica.share
    return replica.all_reduce([torch.as_tensor(loss).detach() * weight])[0]
