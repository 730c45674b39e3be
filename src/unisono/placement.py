"""Placement by hand: choose the device of an op, and be shown where values live."""

import dataclasses
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any

from unisono.backends import Backend, load_backend
from unisono.devices import Placement, simulated_gpus
from unisono.devices.locations import HOST, Location, Locations, find, location
from unisono.errors import ModelError
from unisono.log import logger
from unisono.reserve import num_reserved


def device(name: str) -> AbstractContextManager[None]:
    """Put what Keras computes and creates inside a `with` block on one device.

    The inputs of an op may be on any device, its result is on that of the block. Blocks nest.

    Args:
        name: The device: `"cpu"`, `"cpu:0"`, `"gpu"`, `"gpu:2"`, `"GPU:1"`, `"/gpu:1"` or
            `"cuda:1"`.

    Returns:
        A context manager, which is a decorator as well.

    Raises:
        DeviceError: If there is no such device.

    Example:
        >>> import keras
        >>> with device("cpu"):
        ...     ones = keras.ops.ones((2, 3))
        >>> where(ones).devices
        ('cpu:0',)
    """
    backend = _backend()
    # CPU devices are virtual: as many as are set aside, less those that answer as GPUs.
    num_cpus = num_reserved() - simulated_gpus()
    placement = find(
        name, num_gpus=lambda: simulated_gpus() or backend.num_gpus(), num_cpus=num_cpus
    )
    return _DeviceScope(backend, placement)


class _DeviceScope(ContextDecorator, AbstractContextManager[None]):
    """A backend's scope, entered as often as one likes: again, in itself, or as a decorator."""

    def __init__(self, backend: Backend, placement: Placement) -> None:
        self._backend = backend
        self._placement = placement
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        scope = self._backend.device_scope(self._placement)
        scope.__enter__()
        self._entered.append(scope)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def where(value: Any) -> Any:
    """Tell on which devices a tensor, a variable, a layer or a model is.

    Args:
        value: A tensor, a variable, a NumPy array, a layer, a model, an optimizer or a metric.

    Returns:
        For one value a record with `shape`, `num_bytes`, `devices` and `layout`; NumPy arrays are
        in `"host"` memory. For a layer or a model a table of records, with the variables of the
        optimizer once these exist.

    Raises:
        ModelError: If the value is on no device: a symbolic tensor, a layer that is not built.

    Example:
        >>> import keras
        >>> record = where(keras.Variable([1.0, 2.0]))
        >>> record.layout, record.num_bytes
        ('single', 8)
        >>> table = where(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))
        >>> [record.shape for record in table]
        [(4, 2), (2,)]
    """
    import keras
    import numpy as np

    if isinstance(value, (np.ndarray, np.generic)):
        return location(value.shape, value.nbytes, {HOST: value.nbytes})
    if isinstance(value, keras.Variable):
        return _located(_backend(), [value])[0]
    if isinstance(value, (keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)):
        return _located(_backend(), _variables_of(value))
    found = None if isinstance(value, keras.KerasTensor) else _backend().locate([value])[0]
    if found is None:
        raise ModelError(
            f"Asked where a {type(value).__name__} lives; found nothing that a device holds. Give "
            "a tensor with a value, a variable, a layer, a model or a NumPy array."
        )
    return found


def log_placement(is_on: bool = True) -> None:
    """Print each op with the device that it ran on, on TensorFlow.

    JAX and torch do not report it: one line says so, and what to do instead.

    Args:
        is_on: Whether to print from now on.

    Example:
        >>> log_placement(False)
    """
    reason = _backend().log_placement(is_on)
    if reason is not None and is_on:
        logger.info(f"{reason}; print unisono.where(result) instead")


def _backend() -> Backend:
    import keras

    return load_backend(keras.backend.backend())


def _variables_of(owner: Any) -> list[Any]:
    """All variables of an object of Keras, each once, its optimizer's last."""
    import keras

    if isinstance(owner, keras.Layer) and not owner.built:
        raise ModelError(
            f"Asked where the {type(owner).__name__} {owner.name!r} lives; it has no variables "
            "yet. Call it once, or give it an Input, and ask again."
        )
    variables = list(owner.variables)
    if isinstance(owner, keras.Model) and owner.compiled and owner.optimizer is not None:
        variables += owner.optimizer.variables
    return list({id(variable): variable for variable in variables}.values())


def _located(backend: Backend, variables: list[Any]) -> Locations:
    records: list[Location] = []
    for variable, found in zip(variables, backend.locate(variables), strict=True):
        if found is None:
            raise ModelError(
                f"Asked where the variable {variable.path!r} lives; it has no value at the moment. "
                "Build its layer, or ask when the training step has ended."
            )
        records.append(dataclasses.replace(found, path=variable.path))
    return Locations(records)
