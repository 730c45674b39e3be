"""MXNet's contexts, which Keras on MXNet took in `compile`: `context=[gpu(0), gpu(1)]`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unisono.errors import DeviceError
from unisono.launch.client import current_world
from unisono.parallel import check_model, parallel, place_on_cpus, spread

if TYPE_CHECKING:
    import keras

__all__ = ["Context", "compile", "cpu", "gpu"]

_TEXT = re.compile(r"(cpu|gpu)(?:\(([0-9]*)\))?")


@dataclass(frozen=True)
class Context:
    """A device as MXNet names it; prints as `gpu(0)`.

    Args:
        device_type: `"gpu"` or `"cpu"`.
        device_id: Its number, from 0.

    Example:
        >>> print(Context("gpu", 0))
        gpu(0)
    """

    device_type: str
    device_id: int

    def __str__(self) -> str:
        return f"{self.device_type}({self.device_id})"


def gpu(device_id: int = 0) -> Context:
    """Return the context of a GPU.

    Args:
        device_id: Its number, from 0.

    Returns:
        A `Context`.

    Raises:
        DeviceError: If `device_id` is not a whole number from 0.

    Example:
        >>> print(gpu(1))
        gpu(1)
    """
    return _context("gpu", device_id)


def cpu(device_id: int = 0) -> Context:
    """Return the context of a CPU replica.

    Args:
        device_id: Its number, from 0.

    Returns:
        A `Context`.

    Raises:
        DeviceError: If `device_id` is not a whole number from 0.

    Example:
        >>> print(cpu())
        cpu(0)
    """
    return _context("cpu", device_id)


def compile(
    model: "keras.Model",
    *args: Any,
    context: Context | str | Sequence[Context | str] | None = None,
    **kwargs: Any,
) -> "keras.Model":
    """Compile a model to train on the devices of a list of contexts.

    Args:
        model: A Keras model.
        *args: The positional arguments of `model.compile`.
        context: A context or a list of them: `gpu(0)`, `cpu(0)` or strings such as `"gpu(0)"`. CPU
            contexts give that many CPU replicas. Without any, the model is compiled and not made
            parallel.
        **kwargs: The other arguments of `model.compile`.

    Returns:
        The model itself.

    Raises:
        DeviceError: If contexts are mixed, repeated or malformed, or a GPU does not exist.
        ModelError: If `model` is not a Keras model.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model = compile(model, loss="mse", optimizer="sgd", context=[cpu(0), cpu(1)])
        >>> model.compiled
        True
    """
    check_model(model)
    if context is not None:
        contexts = _contexts(context)
        ids = [one.device_id for one in contexts]
        if current_world() is not None:
            model = parallel(model)  # The launcher has assigned the devices.
        elif contexts[0].device_type == "gpu":
            model = parallel(model, gpus=ids)
        else:
            # Not `replicas=`, which would use GPUs if there are any.
            model = spread(model, place_on_cpus(len(ids)))
    model.compile(*args, **kwargs)
    return model


def _context(kind: str, device_id: int) -> Context:
    if not isinstance(device_id, int) or isinstance(device_id, bool) or device_id < 0:
        raise DeviceError(
            f"Asked for {kind}({device_id!r}); that is not a device id. Ids are whole numbers "
            "from 0."
        )
    return Context(kind, device_id)


def _contexts(given: Any) -> list[Context]:
    """The contexts of a list; raises DeviceError for mixed kinds or repetitions."""
    items = [given] if isinstance(given, (Context, str)) else given
    if not isinstance(items, Sequence):
        raise DeviceError(
            f"Asked for context={given!r}; found a {type(given).__name__}. Give a list such as "
            "[gpu(0), gpu(1)]."
        )
    contexts = [_read(item, given) for item in items]
    if not contexts:
        raise DeviceError(
            "Asked for context=[], without a device. Name at least one, such as [gpu(0)], or leave "
            "context= out."
        )
    shown = f"[{', '.join(map(str, contexts))}]"
    if len({context.device_type for context in contexts}) > 1:
        raise DeviceError(
            f"Asked for context={shown}, which mixes CPUs and GPUs: each step would wait for the "
            "slower. Name devices of one kind."
        )
    if len(set(contexts)) != len(contexts):
        raise DeviceError(f"Asked for context={shown}, which repeats one. Name each once.")
    return contexts


def _read(item: Any, given: Any) -> Context:
    if isinstance(item, Context):
        return _context(item.device_type, item.device_id)
    match = _TEXT.fullmatch(item.strip().lower()) if isinstance(item, str) else None
    if match is None:
        raise DeviceError(
            f"Asked for context={given!r}; {item!r} is not a context. Write gpu(0), cpu(0) or a "
            'string such as "gpu(0)".'
        )
    return Context(match[1], int(match[2] or 0))
