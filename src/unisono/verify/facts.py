"""What a model is made of, as far as it can explain why replicas differ from one device."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from unisono.keras_internals import (
    layers_of,
    optimized_variables,
    value_of,
)
from unisono.parallel import replicated_model
from unisono.replication.introspection import optimizers_of
from unisono.verify.records import LayerFacts, ModelFacts, Site
from unisono.verify.sites import site_of_code

_OWN_METHODS = ("train_step", "test_step", "compute_loss", "compute_metrics", "fit")
_SEED = "seed_generator_state"


def describe_model(
    model: Any, facts: ModelFacts, sites: Mapping[int, Site | None], optimizers: Sequence[Any]
) -> None:
    """Bring the description of a model up to date.

    `sites` of layers and optimizers by id; `optimizers` that custom loops may use for it.
    """
    replicated = replicated_model(model)
    facts.is_parallel = replicated is not None
    if replicated is not None:
        facts.num_replicas = replicated.placement.num_replicas
        facts.is_sync = replicated.sync_batch_norm
    facts.variables = [path_of(variable) for variable in model_variables(model)]
    facts.optimizer_variables = [path_of(v) for v in optimizer_variables(model, optimizers)]
    facts.layers = [describe_layer(layer, sites) for layer in layers_of(model, include_self=False)]
    if _is_random(model):
        facts.layers.append(describe_layer(model, sites))
    facts.dtype = _dtype(model)
    for optimizer in optimizers_for(model, optimizers)[:1]:
        facts.optimizer_site = sites.get(id(optimizer))
        facts.optimizer = facts.optimizer or _config(optimizer)
    facts.own_methods = {
        name: site
        for name in _OWN_METHODS
        if (site := site_of_code(getattr(type(model), name, None))) is not None
    }


def describe_layer(layer: Any, sites: Mapping[int, Site | None]) -> LayerFacts:
    cls = type(layer)
    is_keras = cls.__module__.partition(".")[0] == "keras"
    return LayerFacts(
        name=layer.name,
        path=str(layer.path),
        kind=cls.__name__,
        site=sites.get(id(layer)),
        is_random=_is_random(layer),
        is_batch_norm=isinstance(layer, keras.layers.BatchNormalization),
        is_custom=not is_keras,
        is_stateful=bool(getattr(layer, "stateful", False)),
        inner_batch_norms=_inner_batch_norms(layer),
    )


def model_variables(model: Any) -> list[Any]:
    """The variables that replicas must agree on; states of seeds are counters of their own."""
    return [v for v in model.variables if value_of(v) is not None and v.name != _SEED]


def optimizers_for(model: Any, others: Sequence[Any]) -> list[Any]:
    """A model's own optimizers, and those of a custom loop that train it."""
    own = {id(v) for v in model.trainable_variables}
    found = {id(one): one for one in optimizers_of(model)}
    for one in others:
        if one.built and any(id(v) in own for v in optimized_variables(one)):
            found[id(one)] = one
    return list(found.values())


def optimizer_variables(model: Any, others: Sequence[Any] = ()) -> list[Any]:
    found = {id(v): v for one in optimizers_for(model, others) for v in one.variables}
    return [v for v in found.values() if value_of(v) is not None]


def own_attributes(objects: Iterable[Any]) -> dict[str, Any]:
    """Numbers and words in attributes of objects whose classes the program defines."""
    found = {}
    for number, one in enumerate(objects):
        cls = type(one)
        if cls.__module__.partition(".")[0] in ("keras", "unisono", "torch", "tensorflow", "jax"):
            continue
        for name, value in list(vars(one).items()):
            is_plain = isinstance(value, (bool, int, float, str, type(None)))
            if is_plain and not name.startswith("_") and name not in ("name", "built", "training"):
                found[f"{cls.__name__}.{name} ({number})"] = value
    return found


def path_of(variable: Any) -> str:
    return str(getattr(variable, "path", "") or variable.name)


def _is_random(layer: Any) -> bool:
    """Whether a layer draws numbers while it trains."""
    rates = [
        getattr(layer, name, None)
        for name in ("rate", "stddev", "dropout", "recurrent_dropout", "factor")
    ]
    numbers = [rate for rate in rates if isinstance(rate, (int, float))]
    draws = any(isinstance(v, keras.random.SeedGenerator) for v in vars(layer).values())
    return draws and (not numbers or any(numbers))


def _inner_batch_norms(layer: Any) -> list[str]:
    torch = sys.modules.get("torch")
    module = getattr(layer, "module", None)
    if torch is None or not isinstance(module, torch.nn.Module):
        return []
    kind = torch.nn.modules.batchnorm._BatchNorm
    found = ((name, m) for name, m in module.named_modules() if isinstance(m, kind))
    return [name or type(m).__name__ for name, m in found]


def _dtype(model: Any) -> str:
    """The least precise type that layers compute in."""
    found = {str(layer.compute_dtype) for layer in layers_of(model)}
    return next((name for name in ("bfloat16", "float16") if name in found), "float32")


def _config(optimizer: Any) -> dict[str, Any]:
    try:
        config = optimizer.get_config()
    except Exception:  # A user's own, without one.
        return {}
    found: dict[str, Any] = {"class": type(optimizer).__name__}
    for name, value in config.items():
        if isinstance(value, (int, float, str, bool, type(None))):
            found[name] = value
        elif isinstance(value, dict):
            found[name] = repr(value)[:500]
    return found
